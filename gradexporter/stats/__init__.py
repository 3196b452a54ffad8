"""Reductions of tensors to a few numbers: norm, maximum, non-finite count.

``host`` reduces tensors in main memory and may look at a result to choose what to do next; ``device``
reduces on an accelerator and never asks for one. ``native`` takes the place of ``host`` where the machine's
compiler has built ``kernels.c``, which ``kernels`` decides. Every result is a float64 array of shape
``(rows, tensors)``, on the host or still on the device. The L2 norm of finite values is finite: a sum of
squares that leaves the range of float32 is taken again in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradexporter.records import Values
from gradexporter.stats import device, host, native
from gradexporter.stats import kernels as kernels

Block = Values | Tensor
"""A result: a numpy array, or a float64 tensor that read-back brings to the host."""

State = Mapping[str, Any]

FLOATING = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
)

_ORDINARY_TYPES = frozenset({Tensor, nn.Parameter})
ORDINARY_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_CPU = torch.device("cpu")

_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")
_layout = operator.attrgetter("layout")
_requires_grad = operator.attrgetter("requires_grad")


def plain(tensor: Tensor) -> Tensor:
    """The values of a tensor as one dense, real, local tensor without graph; a view where there is one."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel():
        tensor = tensor.new_zeros(1)  # a sparse tensor without entries is zero everywhere
    return tensor if tensor.dtype.itemsize > 1 else tensor.float()


def measure(tensors: Sequence[Tensor], layout: host.Layout | None = None, *, norms: bool = True) -> Block:
    """L2 norm, largest absolute value and number of non-finite elements: shape ``(3, len(tensors))``.

    ``tensors`` are not empty and have at least one element each. A block of tensors on one accelerator stays
    there. ``layout`` is the ``host.Layout`` of lists with these shapes; ``norms=False`` skips the first row.
    """
    if native.current is not None:
        measured = native.current.measure(tensors, norms=norms)
        if measured is not None:
            return measured
    # One pass of C for each question: asking 800 tensors one by one costs more than reducing them.
    ordinary = _ORDINARY_TYPES.issuperset(map(type, tensors)) and ORDINARY_DTYPES.issuperset(map(_dtype, tensors))
    if not ordinary or set(map(_layout, tensors)) != {torch.strided}:
        tensors, layout = [plain(tensor) for tensor in tensors], None
    elif True in map(_requires_grad, tensors):
        # Not torch.no_grad: an interrupt inside its Python would leave autograd off for the user.
        tensors = [tensor.detach() for tensor in tensors]
    devices = set(map(_device, tensors))
    if devices == {_CPU}:
        return host.measure(tensors, layout, norms=norms)
    home = next(place for place in devices if place != _CPU)
    if len(devices) > 1:
        tensors = [tensor.to(home, non_blocking=True) for tensor in tensors]
    return device.measure(tensors)


def accumulator(layers: int, place: torch.device) -> host.Accumulator | device.Accumulator:
    """For the outputs of all layers on one device."""
    return native.Accumulator(layers) if place.type == "cpu" else device.Accumulator(layers, place)


def extents(tensors: Sequence[Tensor]) -> Block:
    """``measure`` of a batch, plain tensors of one element or more, without norms."""
    if native.current is None and all(tensor.device == _CPU for tensor in tensors):
        return host.extents(tensors)
    return measure(tensors, norms=False)


def extremes(blocks: Sequence[Block]) -> tuple[float | Tensor, float | Tensor]:
    """Largest absolute value and number of non-finite elements over several results of ``measure``."""
    joined = side_by_side(blocks)
    if isinstance(joined, Tensor):
        return joined[1].max(), joined[2].sum()
    return float(joined[1].max()), float(joined[2].sum())


def side_by_side(blocks: Sequence[Block]) -> Block:
    """Several results of ``measure`` as one."""
    if len(blocks) == 1:
        return blocks[0]
    tensors = [block for block in blocks if isinstance(block, Tensor)]
    if not tensors:
        return np.concatenate(blocks, axis=1)
    home = tensors[0].device
    return torch.cat([torch.as_tensor(block).to(home, non_blocking=True) for block in blocks], dim=1)


def update_norms(optimizer: Any, params: Sequence[Tensor]) -> tuple[tuple[int, ...], Block] | None:
    """L2 norm of the last update of each parameter, rebuilt from optimizer state, not from a copy.

    Returns the positions in ``params`` of those that moved and a block of shape ``(1, moved)``; None for an
    optimizer whose update its state does not tell. SGD (with momentum, Nesterov), Adam and AdamW are known;
    decoupled weight decay is left out. Formulas as in the documentation of torch.optim.
    """
    state = getattr(optimizer, "state", {})  # a wrapper need not have any
    return rebuilt_norms(type(optimizer), state, optimizer.param_groups, params)


def rebuilt_norms(
    optimizer: type[torch.optim.Optimizer],
    states: Mapping[Any, State],
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Any],
) -> tuple[tuple[int, ...], Block] | None:
    """``update_norms`` of an optimizer of this class, from its state and its groups."""
    kind = _kind(optimizer)
    rebuild = _sgd_norms if kind == "sgd" else _adam_norms if kind == "adam" else None
    if rebuild is None:
        return None
    position = {id(param): at for at, param in enumerate(params)}
    positions: list[int] = []
    blocks: list[Block] = []
    for group in groups:
        members = [param for param in group["params"] if id(param) in position and param.grad is not None]
        block = rebuild(states, group, members) if members else None
        if block is not None:
            positions += [position[id(param)] for param in members]
            blocks.append(_times(block, group["lr"]))
    return (tuple(positions), side_by_side(blocks)) if blocks else None


def _kind(optimizer: type[torch.optim.Optimizer]) -> str | None:
    step = getattr(optimizer, "step", None)
    if not str(getattr(step, "__module__", "")).startswith("torch.optim"):
        return None  # its name may be that of one of torch, its update is not
    names = {cls.__name__ for cls in optimizer.__mro__}
    return "sgd" if "SGD" in names else "adam" if names & {"Adam", "AdamW"} else None


@dataclass(frozen=True, slots=True)
class AdamState:
    """Parameters, moments and updates of one optimizer, from one pass over all of them."""

    blocks: dict[str, Block]
    """``parameters`` in the order that they were given; ``momentum`` and ``second_moment`` as ``holders`` says."""
    holders: tuple[int, ...]
    """Positions of the parameters that have moments."""
    updates: tuple[tuple[int, ...], Block] | None
    """As ``update_norms`` returns them."""


def adam_state(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> AdamState | None:
    """What ``measure``, ``state_lists`` and ``update_norms`` tell of an Adam in main memory, from a single pass.

    None where only those can: another optimizer, another device, no native kernels, an unusual state.
    """
    library = native.current
    if library is None or _kind(type(optimizer)) != "adam":
        return None
    position = {id(param): at for at, param in enumerate(params)}
    whole = np.empty((10, len(params)))
    alone = set(range(len(params)))
    moved: list[int] = []
    updates: list[Block] = []
    for group in optimizer.param_groups:
        members = [(param, optimizer.state.get(param)) for param in group["params"] if id(param) in position]
        stateful = [(param, state) for param, state in members if state]
        if any(param.grad is not None and not state for param, state in members):
            return None
        if not stateful:
            continue
        block = library.adam([state for _, state in stateful], group, [param for param, _ in stateful])
        if block is None:
            return None
        places = [position[id(param)] for param, _ in stateful]
        whole[:, places] = block
        alone.difference_update(places)
        fresh = [at for at, (param, _) in enumerate(stateful) if param.grad is not None]
        moved += [places[at] for at in fresh]
        updates.append(_times(block[9:, fresh], group["lr"]))
    holders = tuple(at for at in range(len(params)) if at not in alone)
    if not holders:
        return None
    if alone:  # never had a gradient
        rest = sorted(alone)
        measured = measure([params[at] for at in rest])
        if isinstance(measured, Tensor):
            return None
        whole[:3, rest] = measured
    columns = list(holders)
    blocks: dict[str, Block] = {"parameters": whole[:3]}
    blocks |= {"momentum": whole[3:6, columns], "second_moment": whole[6:9, columns]}
    return AdamState(blocks, holders, (tuple(moved), side_by_side(updates)) if moved else None)


def _times(block: Block, rate: float | Tensor) -> Block:
    if not isinstance(rate, Tensor):
        return block * rate
    return (block if isinstance(block, Tensor) else torch.from_numpy(block)) * rate.detach().double()


def _sgd_norms(states: Mapping[Tensor, State], group: State, params: Sequence[Tensor]) -> Block | None:
    directions = [_sgd_direction(states.get(param, {}), group, param) for param in params]
    return measure(directions)[:1]


def _sgd_direction(state: State, group: State, param: Tensor) -> Tensor:
    assert param.grad is not None
    buffer: Tensor | None = state.get("momentum_buffer")
    if buffer is not None and not group.get("nesterov"):
        return buffer
    gradient = param.grad.detach()
    if group.get("maximize"):
        gradient = -gradient
    decay = group.get("weight_decay")
    if decay and gradient.layout is torch.strided:
        # Of the parameter before the update, which is p = (p' + lr g) / (1 - lr decay).
        gradient = (gradient + param.detach() * decay) / (1 - group["lr"] * decay)
    return gradient if buffer is None else gradient + buffer * group["momentum"]


def _adam_norms(states: Mapping[Tensor, State], group: State, params: Sequence[Tensor]) -> Block | None:
    kept = [states.get(param, {}) for param in params]
    needed = {"exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])}
    if any(isinstance(beta, Tensor) for beta in group["betas"]) or not all(needed <= state.keys() for state in kept):
        return None
    moments = [state["exp_avg"] for state in kept]
    if not _ORDINARY_TYPES.issuperset(map(type, moments)) or any(moment.is_complex() for moment in moments):
        return None
    on_host = all(moment.device == _CPU for moment in moments)
    return host.adam_norms(kept, group)[None] if on_host else device.adam_norms(kept, group)[None]


def state_lists(optimizer: Any, params: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """First and second moment of each parameter, None where the optimizer keeps none."""
    first: list[Tensor | None] = []
    second: list[Tensor | None] = []
    for param in params:
        state = optimizer.state.get(param)
        first.append(_moment(state, ("exp_avg", "momentum_buffer")))
        second.append(_moment(state, ("exp_avg_sq", "square_avg", "sum")))
    return first, second


def _moment(state: State | None, names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        value = state.get(name) if state else None
        if isinstance(value, Tensor) and value.numel():
            return value
    return None
