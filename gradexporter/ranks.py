"""The one collective, which only ``all_reduce`` turns on: norms of shares become norms of the model, on every rank.

One small sum a step, over a gloo group of our own and on the worker threads: training neither waits for it nor shares
a queue with it. Every rank contributes once for each step in the order of its steps, whatever it has measured, and
once more when it leaves. A rank that is late, gone or at another step ends it for all: from then on each publishes
its share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradexporter.config import ConfigError
from gradexporter.records import Mask, StepReport, Values

WAIT_SECONDS = 30.0
"""How long a rank may be behind the others; steps close together, so that more is a rank that is gone."""

LEAVE_SECONDS = 2.0
"""How long a rank that closes waits for the others to say the same; at exit nothing may hang."""

_HEAD = 5
"""Slots before the layers: contributions, steps, squares of steps, ranks that leave, ranks with parameter norms."""

_STEPS = 4096
"""Steps are compared modulo this, so that sums of their squares stay exact."""

_UNKNOWN = 2.0**40
"""Counted for a layer whose gradient a rank cannot tell; no number of ranks comes near it."""

_log = logging.getLogger("gradexporter")


def agreed(layers: Sequence[Sequence[str]]) -> Reduction | None:
    """The reduction over all ranks, for optimizers with these layers; None where there is but one rank.

    A collective call: raises ConfigError if not every rank makes it within half a minute with the same layers.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    mine = int.from_bytes(hashlib.sha256(repr(layers).encode()).digest()[:7], "big")
    both = torch.tensor([mine, -mine])
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    except Exception as error:
        raise ConfigError(
            f"all_reduce cannot be used, since the ranks do not meet over gloo ({error}): call watch() with it on "
            "every rank of the process group, or leave it off"
        ) from error
    largest, smallest = both.tolist()
    if largest != -smallest:
        raise ConfigError(
            "all_reduce cannot be used, since the ranks watch different layers, as the stages of a pipeline do: leave "
            "it off"
        )
    return Reduction(group, max(map(len, layers), default=0))


class Reduction:
    """Adds up the shares of a step over all ranks; used by one thread."""

    def __init__(self, group: Any, layers: int) -> None:
        """``layers`` is the most that an optimizer has: contributions are of one size."""
        self.alive = True
        """Whether norms are those of the model; never again once they were not."""
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._layers = layers

    def add(self, report: StepReport, unknown: Sequence[int] = (), *, empty: bool = False) -> StepReport:
        """The report with norms of the model in place of those of this rank's share.

        ``unknown`` are layers whose gradient this rank cannot tell; ``empty`` says that it holds no parameter at all.
        Waits for the other ranks. Maxima, counts and the update ratio stay those of this rank.
        """
        if not self.alive:
            return report
        size = len(report.layers)
        if size > self._layers:
            self._end("the layers have changed")
            return report
        sent = self._blank(report.step)
        gradients, parameters = (sent[at].reshape(2, self._layers) for at in self._columns)
        _contribute(gradients[:, :size], report.layers.column("gradient_norm"))
        gradients[1, list(unknown)] = _UNKNOWN
        pair = report.layers.column("parameter_norm")
        _contribute(parameters[:, :size], pair)
        sent[4] = pair is not None or empty
        total = self._sum(sent, WAIT_SECONDS)
        if total is None:
            return report
        gradients, parameters = (total[at].reshape(2, self._layers)[:, :size] for at in self._columns)
        columns = {name: pair for name, pair in report.layers.columns.items() if name not in _REDUCED}
        fields: dict[str, Any] = dict.fromkeys(_REDUCED)
        fields["gradient_norm"] = _into(columns, "gradient_norm", gradients)
        if total[4] == self._ranks:  # ranks sample the state as their own budgets allow
            fields["parameter_norm"] = _into(columns, "parameter_norm", parameters)
        return dataclasses.replace(report, layers=dataclasses.replace(report.layers, columns=columns), **fields)

    def skip(self, step: int) -> None:
        """Contributes to a step that this rank cannot tell anything about; the others must not wait for it."""
        if self.alive:
            sent = self._blank(step)
            for at in self._columns:
                sent[at].reshape(2, self._layers)[1] = _UNKNOWN
            self._sum(sent, WAIT_SECONDS)

    def leave(self) -> None:
        """The last contribution of this rank, after which the others go on with their shares."""
        if self.alive:
            sent = self._blank(0)
            sent[3] = 1.0
            self.alive = False  # whatever the others say
            self._sum(sent, LEAVE_SECONDS)

    @property
    def _columns(self) -> tuple[slice, slice]:
        middle = _HEAD + 2 * self._layers
        return slice(_HEAD, middle), slice(middle, middle + 2 * self._layers)

    def _blank(self, step: int) -> Values:
        sent = np.zeros(_HEAD + 4 * self._layers)
        sent[:3] = 1.0, step % _STEPS, (step % _STEPS) ** 2
        return sent

    def _sum(self, sent: Values, seconds: float) -> Values | None:
        """The sum over the ranks; None if there is none, which is the end of it."""
        tensor = torch.from_numpy(sent)
        try:
            dist.all_reduce(tensor, group=self._group, async_op=True).wait(timedelta(seconds=seconds))
        except Exception as error:
            self._end(f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__)
            return None
        if sent[3]:
            self._end("a rank closed its monitor")
            return None
        if sent[0] != self._ranks or sent[0] * sent[2] != sent[1] ** 2:
            self._end("the ranks are at different steps")
            return None
        return sent

    def _end(self, why: str) -> None:
        alive, self.alive = self.alive, False
        if alive:
            _log.warning("gradexporter: all_reduce ends (%s); from now on norms are those of this rank's share", why)


_REDUCED = ("gradient_norm", "parameter_norm")


def _contribute(slots: Values, pair: tuple[Values, Mask] | None) -> None:
    """Squares of norms and how many there are."""
    if pair is None:
        return
    values, observed = pair
    with np.errstate(over="ignore", invalid="ignore"):
        slots[0] = np.where(observed, values, 0.0) ** 2
    slots[1] = observed
    slots[1, np.isfinite(values) & np.isinf(slots[0])] = _UNKNOWN  # only norms beyond 1e154


def _into(columns: dict[str, tuple[Values, Mask]], name: str, slots: Values) -> float | None:
    """Puts the norms of the layers into ``columns``; the norm of all, None if one is unknown or there is none."""
    squares, counts = slots
    observed = (counts > 0) & (counts < _UNKNOWN)
    if not observed.any():
        return None
    with np.errstate(invalid="ignore"):
        columns[name] = np.sqrt(squares), observed
    return math.sqrt(squares.sum()) if counts.max() < _UNKNOWN else None
