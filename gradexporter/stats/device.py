"""Reductions of tensors on an accelerator: nothing here asks the device for a value.

Every result stays a float64 tensor on its device until read-back. Sums of squares are accumulated in
float64, so that a norm does not overflow before its tensor does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradexporter.stats.layout import gapless

by_triton = False
"""Whether ``measure`` goes through ``multi_tensor``; set by ``kernels``."""

triton_failed = False
"""Whether it did once and cannot."""

tell_fault: Callable[[BaseException], None] = lambda error: None  # noqa: E731
"""Takes what went wrong there, once."""


def measure(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm, largest absolute value, non-finite count of each tensor: float64, shape ``(3, len(tensors))``."""
    if by_triton:
        block = _measure_by_triton(tensors)
        if block is not None:
            return block
    listed = list(tensors)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(listed, 2, dtype=torch.float64)])
    largest = torch.stack([norm.double() for norm in torch._foreach_norm(listed, math.inf, dtype=torch.float64)])
    counts = torch.stack([count_nonfinite(tensor) for tensor in listed])
    return torch.stack([norms, largest, counts])


def measurable_by_triton(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them lie on a CUDA device without gaps."""
    return all(tensor.is_cuda and gapless(tensor) for tensor in tensors)


def _measure_by_triton(tensors: Sequence[Tensor]) -> Tensor | None:
    """None where stock operations have to: an unusual layout, or after the first fault."""
    global by_triton, triton_failed
    if not measurable_by_triton(tensors):
        return None
    try:
        from gradexporter.stats import multi_tensor  # Triton is optional, and slow to import

        return multi_tensor.measure(tensors)
    except Exception as error:
        by_triton, triton_failed = False, True
        tell_fault(error)
        return None


def count_nonfinite(tensor: Tensor) -> Tensor:
    """Number of NaN and infinite elements as a 0-dim float64 tensor."""
    return torch.isfinite(tensor).logical_not_().sum(dtype=torch.float64)


def adam_norms(states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> Tensor:
    """L2 norm of Adam's last update of each parameter without the rate; see ``host.adam_norms``."""
    beta1, beta2 = group["betas"]
    second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    norms = []
    for state in states:
        root = (1 - beta2 ** state["step"]) ** 0.5
        update = state["exp_avg"] / state[second].sqrt().add_(group["eps"] * root)
        norms.append(torch.linalg.vector_norm(update, 2, dtype=torch.float64) * root / (1 - beta1 ** state["step"]))
    return torch.stack(norms)


ROW = 7
"""Numbers in a row: sum of squares, largest, zeros, elements, non-finite, when it was, dtype's maximum."""


def new_row(place: torch.device) -> Tensor:
    """The row of a layer that has returned nothing yet."""
    return torch.zeros(ROW, dtype=torch.float64, device=place)


def added(row: Tensor, clock: Tensor, tensor: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
    """A row with one more output tensor in it, and the clock one tick later; both are new tensors."""
    row, clock = row.clone(), clock + 1
    row[4] += count_nonfinite(tensor)
    row[5] = clock
    row[6] = torch.finfo(tensor.dtype).max
    if full:
        row[0] += torch.linalg.vector_norm(tensor, 2, dtype=torch.float64).square()
        row[1] = torch.maximum(row[1], torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float64))
        row[2] += tensor.numel() - torch.count_nonzero(tensor)
        row[3] += tensor.numel()
    return row, clock


class Accumulator:
    """Output statistics of all layers over the calls of one step, on one device; see ``host.Accumulator``."""

    def __init__(self, layers: int, place: torch.device) -> None:
        self._block = torch.zeros((5, layers), dtype=torch.float64, device=place)
        self._indexes: dict[tuple[int, ...], Tensor] = {}

    def add(self, layer: int, tensor: Tensor, *, full: bool) -> None:
        """Adds one output tensor; a plain sentinel when not ``full``."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        column = self._block[:, layer]
        column[4] += count_nonfinite(tensor)
        if not full:
            return
        column[0] += torch.linalg.vector_norm(tensor, 2, dtype=torch.float64).square()
        column[1] = torch.maximum(column[1], torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float64))
        column[2] += tensor.numel() - torch.count_nonzero(tensor)
        column[3] += tensor.numel()

    def take(self, layers: Sequence[int]) -> Tensor:
        """A copy of the columns of these layers, which start again from zero."""
        key = tuple(layers)
        index = self._indexes.get(key)
        if index is None:  # copying an index to the device waits for it, so each is copied once
            index = self._indexes[key] = torch.tensor(key, dtype=torch.long, device=self._block.device)
        block = self._block.index_select(1, index)
        self._block.index_fill_(1, index, 0.0)
        return block
