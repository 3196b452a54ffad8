"""From what is known of a step to the one Pending that crosses to the worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradexporter.hooks import compiled
from gradexporter.hooks.partitions import Partitioned
from gradexporter.hooks.watched import Watched
from gradexporter.readback import Number, Pending, closed_on

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture


def close(
    capture: Capture,
    watched: Watched,
    step: int,
    started: float | None,
    now: float,
    losses: list[Number],
    *,
    applied: bool,
) -> Pending:
    """The closed step; what cannot be taken is left out of it, and counted."""
    pending = Pending(
        step=step,
        optimizer=watched.index,
        plan=watched.plan,
        applied=applied,
        started=started,
        closed=now,
        timestamp=time.time(),
        losses=losses,
        rates=watched.rates,
        scaled=watched.scaled,
    )
    pending.unknown = watched.unknown
    block, positions = watched.block, watched.positions
    if block is not None and block.shape[1] == len(positions):  # threads that share a model may be in between
        pending.blocks["gradients"], pending.gradients = block, positions
    there = "gradients" in pending.blocks and not watched.unknown
    capture.signals["gradient"] = capture.signals["layer_gradient"] = there
    capture.signals["learning_rate"] = bool(watched.rates)
    state_seconds = None
    with capture.fence.guarding("hooks"):  # one by one: a step without its state is still a step
        _close_numbers(capture, watched, pending)
    with capture.fence.guarding("hooks"):
        capture.signals["activation"] = _close_outputs(capture, watched, pending)
    with capture.fence.guarding("hooks"):
        if capture.cadence.full("state", pending.step) and watched.parameters:
            state_seconds = _close_state(capture, watched, pending)
    capture.cadence.spent(
        None if started is None else now - started,
        state=state_seconds,
        activation_full=capture.activation_seconds if capture.full_activations else None,
        activation_sentinel=None if capture.full_activations else capture.activation_seconds,
    )
    closed_on(pending)
    return pending


def _close_numbers(capture: Capture, watched: Watched, pending: Pending) -> None:
    if watched.scale is not None:
        pending.numbers["loss_scale"] = watched.scale
    if watched.found_inf is not None:
        pending.numbers["found_inf"] = watched.found_inf.detach().clone().reshape(())
    if watched.again is not None and "gradients" in pending.blocks:
        pending.blocks["reread"], pending.reread = watched.again, watched.reread
        pending.references, pending.still_scaled = watched.references, watched.still_scaled
    if pending.applied and watched.index in capture.restarts:
        brought = capture.restarts.pop(watched.index).brought(watched)
        if brought is not None:
            pending.numbers["state_before"] = brought
    if isinstance(watched.optimizer, Partitioned):
        capture.sight.backward()
        pending.numbers.update(watched.optimizer.numbers())
        capture.signals["gradient"] = capture.signals["pre_clip"] = "gradient_norm" in pending.numbers
        capture.signals["update_ratio"] = False
    capture.observed.close(pending)


def _close_outputs(capture: Capture, watched: Watched, pending: Pending) -> bool:
    rows = capture.layer_hooks.rows if compiled.in_use else {}
    ran = capture.outputs.close(watched.plan.indexes, pending, rows)
    return not capture.layer_hooks.passed_over(watched, pending) and ran


def _close_state(capture: Capture, watched: Watched, pending: Pending) -> float:
    began = time.perf_counter()
    watched.close_state(pending)
    if pending.applied:
        capture.signals["update_ratio"] = watched.close_updates(pending)
    return time.perf_counter() - began + capture.gradients.seconds
