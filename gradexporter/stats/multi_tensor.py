"""Norm, maximum and count of many tensors of one CUDA device in two launches, by Triton.

``device`` imports this module when it is wanted. Nothing here waits for the device: addresses go there in one copy
from pinned memory, which torch's allocator gives to nobody else before the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 65536
"""Elements that one program reduces; as many as torch's own multi-tensor kernels take."""

_ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}

_plans: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, Tensor, Tensor, int]] = {}


@triton.jit
def _reduce_chunks(
    addresses, sizes, firsts, owners, partial, ELEMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of squares, maximum, non-finite elements and NaNs of one chunk."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(firsts + owner)) * CHUNK
    size = tl.load(sizes + owner)
    data = tl.load(addresses + owner).to(tl.pointer_type(ELEMENT))
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    largest = tl.zeros((BLOCK,), dtype=tl.float64)
    odd = tl.zeros((BLOCK,), dtype=tl.float64)
    nans = tl.zeros((BLOCK,), dtype=tl.float64)
    for at in range(0, CHUNK, BLOCK):
        index = start + at + tl.arange(0, BLOCK)
        value = tl.load(data + index, mask=index < size, other=0.0).to(tl.float64)
        magnitude = tl.abs(value)
        nan = value != value
        squares += value * value
        largest = tl.where(magnitude > largest, magnitude, largest)  # false for a NaN
        odd += tl.where(nan | (magnitude == float("inf")), 1.0, 0.0)
        nans += tl.where(nan, 1.0, 0.0)
    out = partial + chunk * 4
    tl.store(out, tl.sum(squares, 0))
    tl.store(out + 1, tl.max(largest, 0))
    tl.store(out + 2, tl.sum(odd, 0))
    tl.store(out + 3, tl.sum(nans, 0))


@triton.jit
def _join_chunks(partial, firsts, out, count, BLOCK: tl.constexpr):
    """The three numbers of one tensor from those of its chunks."""
    owner = tl.program_id(0)
    first = tl.load(firsts + owner)
    last = tl.load(firsts + owner + 1)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    largest = tl.zeros((BLOCK,), dtype=tl.float64)
    odd = tl.zeros((BLOCK,), dtype=tl.float64)
    nans = tl.zeros((BLOCK,), dtype=tl.float64)
    for at in range(first, last, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        there = chunk < last
        squares += tl.load(partial + chunk * 4, mask=there, other=0.0)
        largest = tl.maximum(largest, tl.load(partial + chunk * 4 + 1, mask=there, other=0.0))
        odd += tl.load(partial + chunk * 4 + 2, mask=there, other=0.0)
        nans += tl.load(partial + chunk * 4 + 3, mask=there, other=0.0)
    nan = tl.sum(nans, 0) > 0
    tl.store(out + owner, tl.sqrt(tl.sum(squares, 0)))
    tl.store(out + count + owner, tl.where(nan, float("nan"), tl.max(largest, 0)))
    tl.store(out + 2 * count + owner, tl.sum(odd, 0))


def measure(tensors: Sequence[Tensor]) -> Tensor:
    """As ``device.measure``, of tensors that fill their memory without gaps."""
    dtypes = [tensor.dtype for tensor in tensors]
    kinds = set(dtypes)
    if len(kinds) == 1:
        return _measure_alike(tensors)
    block = torch.empty((3, len(tensors)), dtype=torch.float64, device=tensors[0].device)
    for kind in kinds:
        positions = [at for at, dtype in enumerate(dtypes) if dtype == kind]
        index = _sent(np.array(positions, dtype=np.int64), block.device)
        block.index_copy_(1, index, _measure_alike([tensors[at] for at in positions]))
    return block


def _measure_alike(tensors: Sequence[Tensor]) -> Tensor:
    place, count = tensors[0].device, len(tensors)
    sizes, firsts, owners, chunks = _plan(place, tuple(map(Tensor.numel, tensors)))
    addresses = _sent(np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64), place)
    partial = torch.empty((chunks, 4), dtype=torch.float64, device=place)
    out = torch.empty((3, count), dtype=torch.float64, device=place)
    with torch.cuda.device(place if place.type == "cuda" else -1):
        _reduce_chunks[(chunks,)](
            addresses, sizes, firsts, owners, partial, ELEMENT=_ELEMENTS[tensors[0].dtype], CHUNK=CHUNK, BLOCK=1024
        )
        _join_chunks[(count,)](partial, firsts, out, count, BLOCK=128)
    return out


def _plan(place: torch.device, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Which program reduces what, on the device; sent there once for lists of these sizes."""
    plan = _plans.get((place, sizes))
    if plan is None:
        if len(_plans) >= 64:  # a loop that never touches the same parameters twice
            _plans.clear()
        per_tensor = np.maximum(1, -(-np.array(sizes, dtype=np.int64) // CHUNK))
        firsts = np.concatenate([[0], np.cumsum(per_tensor)])
        owners = np.repeat(np.arange(len(sizes), dtype=np.int64), per_tensor)
        tables = [_sent(table, place) for table in (np.array(sizes, dtype=np.int64), firsts, owners)]
        plan = _plans[place, sizes] = (tables[0], tables[1], tables[2], len(owners))
    return plan


def _sent(table: NDArray[np.int64], place: torch.device) -> Tensor:
    """A table on the device, by a copy that nobody waits for."""
    tensor = torch.from_numpy(table)
    return tensor.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else tensor
