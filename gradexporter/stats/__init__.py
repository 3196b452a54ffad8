"""Reductions of tensors to a few numbers: norm, maximum, non-finite count.

``host`` reduces tensors in main memory and may look at a result to choose what to do next; ``device``
reduces on an accelerator and never asks for one. Every result is a float64 array of shape
``(rows, tensors)``, on the host or still on the device. The L2 norm of finite values is finite: a sum of
squares that leaves the range of float32 is taken again in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradexporter.records import Values
from gradexporter.stats import device, host

Block = Values | Tensor
"""A result: a numpy array, or a float64 tensor that read-back brings to the host."""

FLOATING = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
)


def plain(tensor: Tensor) -> Tensor:
    """The values of a tensor as one dense, real, local tensor without graph; a view where there is one."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype.itemsize > 1 else tensor.float()


def measure(tensors: Sequence[Tensor]) -> Block:
    """L2 norm, largest absolute value and number of non-finite elements: shape ``(3, len(tensors))``.

    ``tensors`` are not empty and have at least one element each. A block of tensors on one accelerator stays there.
    """
    ready = [plain(tensor) for tensor in tensors]
    devices = {tensor.device for tensor in ready}
    if all(place.type == "cpu" for place in devices):
        return host.measure(ready)
    if len(devices) == 1:
        return device.measure(ready)
    home = next(place for place in devices if place.type != "cpu")
    return device.measure([tensor.to(home, non_blocking=True) for tensor in ready])


def extremes(blocks: Sequence[Block]) -> tuple[float | Tensor, float | Tensor]:
    """Largest absolute value and number of non-finite elements over several results of ``measure``."""
    on_device = [block for block in blocks if isinstance(block, Tensor)]
    if not on_device:
        joined = np.concatenate(blocks, axis=1)
        return float(joined[1].max()), float(joined[2].sum())
    home = on_device[0].device
    moved = [torch.as_tensor(block, dtype=torch.float64).to(home, non_blocking=True) for block in blocks]
    tensor = torch.cat(moved, dim=1)
    return tensor[1].max(), tensor[2].sum()


def update_norms(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> tuple[tuple[int, ...], Block] | None:
    """L2 norm of the last update of each parameter, rebuilt from optimizer state, not from a copy.

    Returns the positions in ``params`` of those that moved and a block of shape ``(1, moved)``; None for an
    optimizer whose update its state does not tell. SGD (with momentum, Nesterov), Adam and AdamW are known;
    decoupled weight decay is left out. Formulas as in the documentation of torch.optim.
    """
    kind = {cls.__name__ for cls in type(optimizer).__mro__}
    direction = _sgd_direction if "SGD" in kind else _adam_direction if kind & {"Adam", "AdamW"} else None
    if direction is None:
        return None
    position = {id(param): at for at, param in enumerate(params)}
    positions: list[int] = []
    blocks: list[Block] = []
    for group in optimizer.param_groups:
        members = [param for param in group["params"] if id(param) in position and param.grad is not None]
        rebuilt = [(position[id(param)], direction(optimizer.state.get(param, {}), group, param)) for param in members]
        known = [(at, update) for at, update in rebuilt if update is not None]
        if known:
            positions += [at for at, _ in known]
            blocks.append(_times(measure([update for _, update in known])[:1], group["lr"]))
    if not blocks:
        return None
    return tuple(positions), _side_by_side(blocks)


def _times(block: Block, rate: float | Tensor) -> Block:
    if not isinstance(rate, Tensor):
        return block * rate
    factor = rate.detach().double()
    return (block if isinstance(block, Tensor) else torch.from_numpy(block)) * factor


def _side_by_side(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    if not any(isinstance(block, Tensor) for block in blocks):
        return np.concatenate(blocks, axis=1)
    return torch.cat([torch.as_tensor(block) for block in blocks], dim=1)


State = Mapping[str, Any]


def _sgd_direction(state: State, group: State, param: Tensor) -> Tensor | None:
    assert param.grad is not None
    gradient = plain(param.grad)
    if gradient.shape != param.shape:
        return None
    if group.get("maximize"):
        gradient = -gradient
    decay = group.get("weight_decay")
    if decay:  # of the parameter before the update, which is p = (p' + lr g) / (1 - lr decay)
        gradient = (gradient + param.detach() * decay) / (1 - group["lr"] * decay)
    buffer: Tensor | None = state.get("momentum_buffer")
    if not group.get("momentum") or buffer is None:
        return gradient
    return gradient + buffer * group["momentum"] if group.get("nesterov") else buffer


def _adam_direction(state: State, group: State, param: Tensor) -> Tensor | None:
    if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
        return None
    beta1, beta2 = group["betas"]
    first = 1 - beta1 ** state["step"]
    second = 1 - beta2 ** state["step"]
    squares: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    direction: Tensor = state["exp_avg"] / ((squares / second).sqrt_().add_(group["eps"]).mul_(first))
    return direction


def state_lists(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """First and second moment of each parameter, None where the optimizer keeps none."""
    first: list[Tensor | None] = []
    second: list[Tensor | None] = []
    for param in params:
        state = optimizer.state.get(param)
        first.append(_moment(state, ("momentum_buffer", "exp_avg")))
        second.append(_moment(state, ("exp_avg_sq", "square_avg", "sum")))
    return first, second


def _moment(state: dict[str, object] | None, names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        value = state.get(name) if state else None
        if isinstance(value, Tensor) and value.numel() and value.dtype in FLOATING:
            return value
    return None
