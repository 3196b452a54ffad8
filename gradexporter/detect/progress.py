"""Whether the loss still falls and how much it swings, from a handful of numbers."""

from __future__ import annotations

import math
import statistics
from typing import Any

_START_READINGS = 10
"""Readings whose median is the loss that the run started from."""

_TAU_STEPS = 8
"""Memory of the recent loss: short, so that progress of the first steps shows."""

_LARGEST_SHARE = 4.0
"""Losses count as this many times the first ones at most."""

_SMALLEST = 1e-12
"""Losses below it count as this much, zero among them."""


class Smooth:
    """An exponential mean that a reading after a gap moves further."""

    __slots__ = ("_step", "_tau", "value")

    def __init__(self, tau_steps: float) -> None:
        self._tau = tau_steps
        self._step = 0
        self.value = math.nan

    def add(self, reading: float, step: int) -> None:
        """Counts a finite reading in."""
        gap = min(max(step - self._step, 1), self._tau)
        self._step = step
        if math.isnan(self.value):
            self.value = reading
        else:
            self.value += (1 - (1 - 1 / self._tau) ** gap) * (reading - self.value)


class Progress:
    """The loss now against the loss at the start; unknown for a loss that was ever below zero.

    Losses of adversarial, reinforcement and likelihood training change their sign, so that a share of
    the first loss says nothing about them.
    """

    def __init__(self, tau_steps: float) -> None:
        """``tau_steps`` is the memory that the trend is held against."""
        self._start: list[float] = []
        self._share = Smooth(_TAU_STEPS)
        self._recent = Smooth(_TAU_STEPS)
        self._usual = Smooth(tau_steps)
        self._swing = Smooth(_TAU_STEPS)
        self._last = math.nan
        self.signed = False
        """The loss was below zero at least once."""

    def observe(self, loss: float | None, step: int) -> None:
        """Counts the loss of a step in, if it has a finite one."""
        if loss is None or not math.isfinite(loss):
            return
        self.signed = self.signed or loss < 0
        if len(self._start) < _START_READINGS:
            self._start.append(loss)
        start = statistics.median_low(self._start)
        if start > 0:
            # Bounded, since one outlier of a million would outweigh the hundred losses after it.
            self._share.add(min(loss / start, _LARGEST_SHARE), step)
        u = math.log10(max(loss, _SMALLEST))
        self._recent.add(u, step)
        self._usual.add(u, step)
        if self._last > 0 and loss > 0:
            self._swing.add(abs(math.log10(loss) - math.log10(self._last)), step)
        self._last = loss

    @property
    def share(self) -> float:
        """The smoothed loss as a share of the first ones; NaN where unknown."""
        return math.nan if self.signed else self._share.value

    @property
    def trend_decades(self) -> float:
        """How far the recent loss lies above the usual one, below zero where it falls; NaN where unknown."""
        return math.nan if self.signed else self._recent.value - self._usual.value

    @property
    def swing_decades(self) -> float:
        """How far the loss moves from step to step, up or down; NaN where unknown."""
        return math.nan if self.signed else self._swing.value

    def state_dict(self) -> dict[str, Any]:
        """The losses that the run started from."""
        return {"start": list(self._start), "signed": self.signed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues against the start of the run that was saved."""
        self._start = [float(loss) for loss in state["start"]]
        self.signed = bool(state["signed"])
