"""From results of one step, wherever they lie, to a StepReport: the only device-to-host copy of the package.

The trainer thread packs what is still on a device into one buffer and starts one non-blocking copy to
pinned memory; the worker thread waits for the copy, folds parameters into layers and builds the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradexporter.records import FLOAT32_MAX, LayerTable, Mask, StepReport, Values
from gradexporter.reread import Reread
from gradexporter.stats import Block

Indexes = NDArray[np.intp]

Number = float | Tensor
"""A value that may still be on a device, as a 0-dim tensor."""


@dataclass(slots=True)
class Pending:
    """One closed step before it is read: blocks and numbers on the host or on a device."""

    step: int
    optimizer: int
    plan: Plan
    applied: bool
    started: float | None
    """Monotonic seconds at which the step before closed; None for the first."""
    closed: float
    """Monotonic seconds at which this one closed."""
    timestamp: float
    blocks: dict[str, Block] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    losses: list[Number] = field(default_factory=list)
    gradients: tuple[int, ...] = ()
    """Positions of the parameters that had a gradient, sorted."""
    unknown: tuple[int, ...] = ()
    """Positions of those whose gradient is not reduced over ranks yet."""
    moments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    updates: tuple[int, ...] = ()
    rates: list[Number] = field(default_factory=list)
    order: Values | None = None
    """Rank in which each layer's forward returned, -1 where it did not run."""
    dtype_max: Values | None = None
    scaled: bool = True
    """Whether the gradients still carried the loss scale when they were measured."""
    reread: Reread | None = None
    """Takes in what ``blocks["reread"]`` says: gradients of these parameters as the update used them."""
    references: tuple[int, ...] = ()
    """Positions of the parameters that were read again before the update."""
    still_scaled: bool = False
    """Whether they still carried the loss scale then."""
    stream: torch.cuda.Stream | None = None
    """Where the results were computed; the step may be sealed by a thread with another current stream."""
    copy: tuple[Tensor, torch.cuda.Event] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the parameters of one optimizer fold into its layers."""

    layers: tuple[str, ...]
    """Names of the layers of this optimizer, in the order of the model."""
    indexes: tuple[int, ...]
    """Their positions among all layers of the model."""
    owners: Indexes
    """For each parameter the position of its layer in ``layers``."""
    copies: Values | None = None
    """For each parameter the ranks that hold the same values: 1/copies of a square counts here, so that shares of
    ranks can be added. None where this rank holds the whole model."""

    def owners_of(self, positions: Sequence[int]) -> Indexes:
        """The layers of the parameters at these positions, which are sorted."""
        return self.owners if len(positions) == len(self.owners) else self.owners[list(positions)]

    def shared(self, norms: Values, positions: Sequence[int]) -> Values:
        """The part of these norms that counts on this rank."""
        return norms if self.copies is None else norms / np.sqrt(self.copies[list(positions)])


def closed_on(pending: Pending) -> None:
    """Notes the stream that the results of a closing step are computed on; without a device it does nothing."""
    places = [value for value in _device_values(pending) if value.device.type == "cuda"]
    if places:
        pending.stream = torch.cuda.current_stream(places[0].device)


def pack(pending: Pending) -> None:
    """Starts the copy of everything that lies on a device; without a device it does nothing.

    Does not wait: one flat float64 buffer, one copy to pinned memory, one event.
    """
    if pending.stream is None:
        return
    with torch.cuda.stream(pending.stream):
        _start_copy(pending)


def _start_copy(pending: Pending) -> None:
    places = [value for value in _device_values(pending) if value.device.type == "cuda"]
    home = places[0].device
    flat = torch.cat([value.detach().reshape(-1).to(home, torch.float64, non_blocking=True) for value in places])
    landed = torch.empty(flat.shape, dtype=torch.float64, pin_memory=True)
    landed.copy_(flat, non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(home))
    pending.copy = (landed, event)


def _device_values(pending: Pending) -> list[Tensor]:
    values = [*pending.blocks.values(), *pending.numbers.values(), *pending.losses, *pending.rates]
    return [value for value in values if isinstance(value, Tensor)]


class Reader:
    """Builds reports on the worker thread; remembers the parameter norms of the step before."""

    def __init__(self) -> None:
        self._norms: dict[int, tuple[int, Values]] = {}

    def report(self, pending: Pending) -> StepReport:
        """The unjudged report of a step; waits for its copy, so never on the trainer thread."""
        _land(pending)
        _join_compiled(pending)
        before = self._norms.get(pending.optimizer)
        known = before[1] if before is not None and before[0] == pending.step - 1 else None
        report = _report(pending, known)
        column = report.layers.column("parameter_norm")
        if column is not None:
            self._norms[pending.optimizer] = (pending.step, column[0])
        return report


def _report(pending: Pending, norms_before: Values | None) -> StepReport:
    plan, numbers = pending.plan, {name: _number(value) for name, value in pending.numbers.items()}
    columns: dict[str, tuple[Values, Mask]] = {}
    nonfinite: dict[str, float] = {}
    fields: dict[str, Any] = {}
    scale = numbers.get("loss_scale")
    applied = pending.applied and not numbers.get("found_inf", 0.0)
    _fold_gradients(pending, columns, nonfinite, fields, scale if pending.scaled else None)
    if "reread" in pending.blocks and pending.reread is not None:
        _fold_change(pending, pending.reread, fields, scale)
    if "gradient_norm" in numbers:
        fields["gradient_norm"] = numbers["gradient_norm"]
    _fold_state(pending, columns, nonfinite, fields)
    if applied:
        _fold_updates(pending, columns, fields, norms_before)
    _fold_activations(pending, columns, nonfinite, fields)
    for name in ("input", "target"):
        if f"{name}_max_abs" in numbers:
            fields[f"{name}_max_abs"] = numbers[f"{name}_max_abs"]
    if "state_before" in numbers:
        fields["optimizer_state_before"] = numbers["state_before"]
    if numbers.get("input_nonfinite"):
        nonfinite["input"] = numbers["input_nonfinite"]
    losses = [_number(loss) for loss in pending.losses]
    loss = math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else _odd_mean(losses)
    if loss is not None:
        nonfinite["loss"] = float(sum(not math.isfinite(part) for part in losses))
    rates = tuple(_number(rate) for rate in pending.rates)
    ran = None if pending.order is None or pending.dtype_max is None else pending.dtype_max[pending.order >= 0]
    dtype_max = FLOAT32_MAX if ran is None or not ran.size else float(ran.min())
    return StepReport(
        step=pending.step,
        loss=loss,
        learning_rate=max(rates, default=None),
        nonfinite=nonfinite,
        applied=applied,
        layers=LayerTable(plan.layers, columns),
        dtype_max=dtype_max,
        loss_scale=scale,
        optimizer=pending.optimizer,
        group_learning_rates=rates,
        step_seconds=None if pending.started is None else pending.closed - pending.started,
        timestamp=pending.timestamp,
        **fields,
    )


def _land(pending: Pending) -> None:
    if pending.copy is None:
        return
    landed, event = pending.copy
    event.synchronize()
    flat, at = landed.numpy(), 0

    def taken(value: Block | Number) -> Block | Number:
        nonlocal at
        if not isinstance(value, Tensor) or value.device.type != "cuda":
            return value
        part = flat[at : at + value.numel()].reshape(tuple(value.shape))
        at += value.numel()
        return part.copy() if part.ndim else float(part)

    pending.blocks = {name: taken(value) for name, value in pending.blocks.items()}  # type: ignore[misc]
    pending.numbers = {name: taken(value) for name, value in pending.numbers.items()}  # type: ignore[misc]
    pending.losses = [taken(value) for value in pending.losses]  # type: ignore[misc]
    pending.rates = [taken(value) for value in pending.rates]  # type: ignore[misc]
    pending.copy = None


def _join_compiled(pending: Pending) -> None:
    """Turns the rows that compiled code filled on a device into activations like the others."""
    for name in [name for name in pending.blocks if name.startswith("compiled")]:
        *sums, when, dtype_max = _array(pending.blocks.pop(name))
        pending.blocks[f"activations {name}"] = np.array(sums)
        ran = when > 0
        if pending.order is not None and (pending.order[ran] < 0).any():
            pending.order = np.where(ran, when, pending.order)  # a graph was replayed: only the device knows when
        if pending.dtype_max is not None:
            pending.dtype_max = np.where(ran, dtype_max, pending.dtype_max)


def _number(value: Number | Values) -> float:
    return float(value.reshape(()) if isinstance(value, np.ndarray) else value)


def _array(block: Block) -> Values:
    return block.double().numpy() if isinstance(block, Tensor) else block


def _odd_mean(losses: Sequence[float]) -> float | None:
    if not losses:
        return None
    return math.nan if any(map(math.isnan, losses)) else sum(losses) / len(losses)


def _fold_gradients(
    pending: Pending,
    columns: dict[str, tuple[Values, Mask]],
    nonfinite: dict[str, float],
    fields: dict[str, Any],
    scale: float | None,
) -> None:
    if "gradients" not in pending.blocks:
        return
    block = _array(pending.blocks["gradients"])
    if scale:
        block = np.concatenate([block[:2] / scale, block[2:]])
    owners = pending.plan.owners_of(pending.gradients)
    size = len(pending.plan.layers)
    seen = np.zeros(size, dtype=bool)
    seen[owners] = True
    if pending.unknown:
        seen[pending.plan.owners[list(pending.unknown)]] = False
    norms, rest = pending.plan.shared(block[0], pending.gradients), block[1:]
    # Norms alone come from a clip, and all of them are finite: then every element is.
    counts = rest[1] if len(rest) else np.zeros(len(norms))
    columns["gradient_norm"] = (_added(owners, norms, size, squared=True), seen)
    columns["gradient_nonfinite"] = (_added(owners, counts, size), seen)
    if not pending.unknown:
        fields["gradient_norm"] = _hypot(norms)
    nonfinite["gradient"] = float(counts.sum())
    if len(rest):
        columns["gradient_max_abs"] = (_largest(owners, rest[0], size), seen)
        if not pending.unknown:
            fields["gradient_max_abs"] = float(np.max(rest[0]))


def _fold_change(pending: Pending, reread: Reread, fields: dict[str, Any], scale: float | None) -> None:
    """What clipping did; ``reread`` learns from it, and picks its parameters where only this thread sees values."""
    gradients, again = _array(pending.blocks["gradients"]), _array(pending.blocks["reread"])
    before = gradients[:, np.searchsorted(pending.gradients, pending.references)]
    if scale and pending.scaled != pending.still_scaled:
        before = before / scale if pending.scaled else before * scale
    change = reread.change(before, again)
    if pending.stream is not None:
        reread.choose(pending.gradients, gradients)
    reread.follow(change, fields.get("gradient_norm"))
    fields["clip_factor"] = None if change.factor is not None and change.factor > 1 else change.factor
    fields["clipped"] = change.clipped


def _fold_state(
    pending: Pending,
    columns: dict[str, tuple[Values, Mask]],
    nonfinite: dict[str, float],
    fields: dict[str, Any],
) -> None:
    owners, size = pending.plan.owners, len(pending.plan.layers)
    if "parameters" in pending.blocks:
        norms, largest, counts = _array(pending.blocks["parameters"])
        norms = pending.plan.shared(norms, range(len(norms)))
        seen = np.zeros(size, dtype=bool)
        seen[owners] = True
        columns["parameter_norm"] = (_added(owners, norms, size, squared=True), seen)
        columns["parameter_max_abs"] = (_largest(owners, largest, size), seen)
        fields["parameter_norm"] = _hypot(norms)
        fields["parameter_max_abs"] = float(np.max(largest))
        nonfinite["parameter"] = float(counts.sum())
    for name, positions in pending.moments.items():
        _, largest, counts = _array(pending.blocks[name])
        holders = pending.plan.owners_of(positions)
        seen = np.zeros(size, dtype=bool)
        seen[holders] = True
        columns[f"{name}_max_abs"] = (_largest(holders, largest, size), seen)
        fields[f"{name}_max_abs"] = float(np.max(largest))
        nonfinite["optimizer_state"] = nonfinite.get("optimizer_state", 0.0) + float(counts.sum())


def _fold_updates(
    pending: Pending, columns: dict[str, tuple[Values, Mask]], fields: dict[str, Any], norms_before: Values | None
) -> None:
    """Update over the parameters that it changed; where their norm was not measured, over those after it."""
    if "updates" not in pending.blocks or "parameter_norm" not in columns:
        return
    size = len(pending.plan.layers)
    moved = pending.plan.owners[list(pending.updates)]
    updates = pending.plan.shared(_array(pending.blocks["updates"])[0], pending.updates)
    norms = columns["parameter_norm"][0] if norms_before is None or len(norms_before) != size else norms_before
    there = np.zeros(size, dtype=bool)
    there[moved] = True
    with np.errstate(divide="ignore", invalid="ignore"):
        columns["update_ratio"] = (_added(moved, updates, size, squared=True) / norms, there & (norms != 0))
    whole = _hypot(norms)
    fields["update_ratio"] = _hypot(updates) / whole if whole else None


def _fold_activations(
    pending: Pending,
    columns: dict[str, tuple[Values, Mask]],
    nonfinite: dict[str, float],
    fields: dict[str, Any],
) -> None:
    order = pending.order
    blocks = [_array(block) for name, block in pending.blocks.items() if name.startswith("activations")]
    if order is None or not blocks:
        return
    squares, _, zeros, elements, counts = np.sum(blocks, axis=0)
    largest = np.max([block[1] for block in blocks], axis=0)
    ran = order >= 0
    columns["execution_order"] = (order, ran)
    columns["activation_nonfinite"] = (counts, ran)
    nonfinite["activation"] = float(counts.sum())
    measured = ran & (elements > 0)
    if measured.any():
        size = np.where(measured, elements, 1.0)
        columns["activation_rms"] = (np.sqrt(squares / size), measured)
        columns["activation_max_abs"] = (largest, measured)
        columns["activation_zero_ratio"] = (zeros / size, measured)
        fields["activation_max_abs"] = float(np.max(largest[measured]))
    if pending.dtype_max is not None and (pending.dtype_max != FLOAT32_MAX).any():
        columns["dtype_max"] = (pending.dtype_max, ran)


_LEAST_SAFE, _MOST_SAFE = 1e-100, 1e100


def _added(owners: Indexes, values: Values, size: int, *, squared: bool = False) -> Values:
    """Sum, or root of the sum of squares, by layer; scaled so that no square overflows."""
    if not squared:
        return np.asarray(np.bincount(owners, weights=values, minlength=size), dtype=np.float64)
    top = float(values.max(initial=0.0))
    if _LEAST_SAFE < top < _MOST_SAFE:  # nearly always, and then no square leaves the range of float64
        return np.asarray(np.sqrt(np.bincount(owners, weights=values * values, minlength=size)))
    unit = top if 0 < top < math.inf else 1.0
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return np.asarray(np.sqrt(np.bincount(owners, weights=(values / unit) ** 2, minlength=size)) * unit)


def _largest(owners: Indexes, values: Values, size: int) -> Values:
    largest = np.zeros(size)
    with np.errstate(invalid="ignore"):  # NaN goes through, and says so
        np.maximum.at(largest, owners, values)
    return largest


def _hypot(norms: Values) -> float:
    top = float(norms.max(initial=0.0))
    if _LEAST_SAFE < top < _MOST_SAFE:
        return math.sqrt(float(norms @ norms))
    return float(_added(np.zeros(len(norms), dtype=np.intp), norms, 1, squared=True)[0])
