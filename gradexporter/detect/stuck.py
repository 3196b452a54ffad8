"""What does not move or leads nowhere: skipped updates, dead and starved layers, stalls, oscillation.

Each rule looks at one step and keeps a few numbers between steps, or a few a layer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradexporter.config import JudgeConfig
from gradexporter.detect.headroom import is_size
from gradexporter.detect.nonfinite import execution_order, producer
from gradexporter.detect.progress import Smooth
from gradexporter.detect.step import Episode, Step
from gradexporter.records import Finding, FindingKind, Mask, Quantity


class ScaleCollapse:
    """Skipped updates that do not stop; those at the start, while the scaler looks for its scale, are benign."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._skips = 0
        self._applied = False

    def __call__(self, step: Step) -> Finding | None:
        if step.report.applied is not False:
            self._skips = 0
            self._applied = self._applied or step.report.applied is True
            return None
        self._skips += 1
        config, scale, usual = self._config, step.report.loss_scale, step.baselines.usual("loss_scale")
        limit = config.skips_in_a_row if self._applied or (is_size(scale) and scale < 1) else config.skips_at_start
        fallen = is_size(scale) and usual is not None and scale < usual * 10**-config.scale_fall_decades
        if self._skips < limit and not fallen:
            return None
        step.standing.add(FindingKind.SCALE_COLLAPSE)
        return step.finding(
            FindingKind.SCALE_COLLAPSE,
            Quantity.LOSS_SCALE,
            layer=producer(step.report.layers, Quantity.GRADIENT),
            value=scale,
            baseline=usual,
        )


class StalledUpdates:
    """Updates that change nothing though gradient and learning rate are there, for many steps.

    Exactly zero is a stall whatever the loss; next to nothing is one only while the loss has not fallen.
    A rate that is zero or has sunk to almost nothing is the schedule's doing, unless it fell there in one step.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._largest_rate = 0.0
        self._last_rate = 0.0
        self._is_cut = False
        self._since: int | None = None
        self._readings = 0
        self._episode = Episode(config, FindingKind.STALLED_UPDATES)

    def __call__(self, step: Step) -> Finding | None:
        config, report = self._config, step.report
        self._follow(report.learning_rate)
        if report.applied is False or report.update_ratio is None:
            return None
        if not (self._is_still(step, report.update_ratio) and is_size(report.gradient_norm)):
            self._since, self._readings = None, 0
            return None
        if self._since is None:
            self._since = report.step
        self._readings += 1
        holds = self._readings >= config.warmup_readings and report.step - self._since >= config.stalled_steps
        if not self._episode.reports(step, holds):
            return None
        return step.found(FindingKind.STALLED_UPDATES, "update_ratio")

    def _follow(self, rate: float | None) -> None:
        if not is_size(rate):
            self._last_rate = self._last_rate if rate is None else 0.0
            return
        cut = 10**-self._config.stalled_cut_decades
        self._is_cut = rate < self._last_rate * cut or (self._is_cut and rate < self._largest_rate * cut)
        self._largest_rate = max(self._largest_rate, rate)
        self._last_rate = rate

    def state_dict(self) -> dict[str, Any]:
        """What the schedule has done so far: at its end, updates are small without a stall."""
        return {"largest": self._largest_rate, "last": self._last_rate, "is_cut": self._is_cut}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues within the schedule of the run that was saved."""
        self._largest_rate, self._last_rate = float(state["largest"]), float(state["last"])
        self._is_cut = bool(state["is_cut"])

    def _is_still(self, step: Step, update: float) -> bool:
        config, rate = self._config, step.report.learning_rate
        if rate is not None and not rate > 0:
            return False
        unconverged = step.progress.share > config.stalled_loss_share
        if self._is_cut:
            return unconverged
        if rate is not None and rate < config.stalled_rate_share * self._largest_rate:
            return False
        return update == 0 or (0 < update < config.stalled_update_ratio and unconverged)


class DeadLayer:
    """A layer whose gradient is exactly zero, step after step, while the run still has something to learn.

    A layer counts at once if nothing in front of it has a gradient either, since nothing passes a dead
    layer, or if its activations are all zero too. Any other must have had a gradient before, and be
    without for long: a branch that the loss does not use now and then is not dead.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._names: tuple[str, ...] = ()
        self._running = np.zeros(0, dtype=np.int64)
        self._alive = np.zeros(0, dtype=bool)
        self._off = np.zeros(0, dtype=bool)
        self._episode = Episode(config, FindingKind.DEAD_LAYER)

    def __call__(self, step: Step) -> Finding | None:
        table = step.report.layers
        column = table.column("gradient_norm")
        if column is None or step.report.applied is False:
            return None
        if table.names is not self._names and table.names != self._names:
            self._running = np.zeros(len(table), dtype=np.int64)
            self._alive = np.zeros(len(table), dtype=bool)
            self._off = np.zeros(len(table), dtype=bool)
        self._names = table.names
        values, observed = column
        zero = observed & (values == 0)
        learning = is_size(step.report.gradient_norm) or is_size(step.report.loss)
        if not (learning and zero.any()):
            self._running[:] = 0
            self._alive |= observed & ~zero
            return None
        layer = self._first_dead(step, zero, observed & ~zero)
        if not self._episode.reports(step, layer is not None):
            return None
        return step.finding(FindingKind.DEAD_LAYER, Quantity.GRADIENT, layer=layer, value=0.0)

    def _first_dead(self, step: Step, zero: Mask, fed: Mask) -> str | None:
        table, config = step.report.layers, self._config
        order = execution_order(table)
        ran = ~np.isnan(order)
        self._alive |= fed
        self._running = np.where(zero & ran, self._running + 1, 0)
        zeros = table.column("activation_zero_ratio")
        if zeros is not None:
            self._off = np.where(zeros[1], zeros[0] >= 1, self._off)
        if not (self._running >= config.dead_steps).any():
            return None
        in_front = order < np.where(fed & ran, order, np.inf).min()
        branch = self._alive & (self._running >= config.dead_branch_steps)
        dead = ((self._running >= config.dead_steps) & (in_front | self._off)) | branch
        return table.names[int(np.argmin(np.where(dead, order, np.inf)))] if dead.any() else None


class VanishingGradient:
    """The first layer's gradient next to nothing beside the largest, for many steps, and no progress.

    Only the first layer counts: norms that differ by decades further up are a matter of architecture.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._running = 0
        self._episode = Episode(config, FindingKind.VANISHING_GRADIENT)

    def __call__(self, step: Step) -> Finding | None:
        config, table = self._config, step.report.layers
        column = table.column("gradient_norm")
        if column is None or step.report.applied is False:
            return None
        values, observed = column
        order = execution_order(table)
        usable = observed & (values > 0) & (values < np.inf) & ~np.isnan(order)
        if not usable.any():
            return None
        first = int(np.argmin(np.where(usable, order, np.inf)))
        largest = float(values[usable].max())
        decades = math.log10(largest) - math.log10(float(values[first]))
        share = step.progress.share
        limit = config.vanishing_blind_decades if math.isnan(share) else config.vanishing_decades
        starved = decades > limit and not share < config.no_progress_share
        self._running = self._running + 1 if starved else 0
        if not self._episode.reports(step, self._running >= config.vanishing_steps):
            return None
        return step.finding(
            FindingKind.VANISHING_GRADIENT,
            Quantity.GRADIENT,
            layer=table.names[first],
            value=float(values[first]),
            baseline=largest,
        )


class Oscillation:
    """Large updates and a loss that swings without falling, for many steps."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._update = Smooth(config.oscillation_tau_steps)
        self._since: int | None = None
        self._share = math.nan
        self._episode = Episode(config, FindingKind.OSCILLATION)

    def __call__(self, step: Step) -> Finding | None:
        config, progress, number = self._config, step.progress, step.report.step
        if step.observed("update_ratio") and (update := step.report.update_ratio) is not None:
            self._update.add(math.log10(update), number)
        swings = (
            self._update.value > math.log10(config.oscillation_update_ratio)
            and progress.share > config.oscillation_loss_share
            and progress.swing_decades > config.oscillation_swing_decades
        )
        if not swings:
            self._since = None
        elif self._since is None or progress.share < config.oscillation_falling_share * self._share:
            self._since, self._share = number, progress.share
        lasts = self._since is not None and number - self._since >= config.oscillation_steps
        if not self._episode.reports(step, lasts, silent=not step.quiet):
            return None
        return step.found(FindingKind.OSCILLATION, "loss")
