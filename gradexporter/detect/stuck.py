"""What does not move or leads nowhere: skipped updates, dead and starved layers, stalls, oscillation.

Each rule looks at one step and keeps a few numbers between steps, or a few a layer.
"""

from __future__ import annotations

import math

import numpy as np

from gradexporter.config import JudgeConfig
from gradexporter.detect.headroom import is_size
from gradexporter.detect.nonfinite import execution_order, producer
from gradexporter.detect.progress import Smooth
from gradexporter.detect.step import NEVER, Episode, Step
from gradexporter.records import Finding, FindingKind, Mask, Quantity, Values


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

    Exactly zero is a stall whatever the loss; next to nothing is one only while the loss has not fallen
    and the rate is what it was, so that neither warm-up, nor the end of a schedule, nor a converged run is.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._largest_rate = 0.0
        self._since: int | None = None
        self._readings = 0
        self._episode = Episode(config, FindingKind.STALLED_UPDATES)

    def __call__(self, step: Step) -> Finding | None:
        config, report = self._config, step.report
        rate, update = report.learning_rate, report.update_ratio
        if rate is not None and math.isfinite(rate):
            self._largest_rate = max(self._largest_rate, rate)
        if report.applied is False or update is None:
            return None
        still = update == 0 or (0 < update < config.stalled_update_ratio and step.progress.share > _CONVERGED_SHARE)
        driven = rate is None or rate > config.stalled_rate_share * self._largest_rate
        if not (still and driven and is_size(report.gradient_norm)):
            self._since, self._readings = None, 0
            return None
        if self._since is None:
            self._since = report.step
        self._readings += 1
        holds = self._readings >= config.warmup_readings and report.step - self._since >= config.stalled_steps
        if not self._episode.reports(step, holds):
            return None
        return step.found(FindingKind.STALLED_UPDATES, "update_ratio")


_CONVERGED_SHARE = 0.1
"""A loss below this share of the first ones is taken as converged."""


class DeadLayer:
    """A layer whose gradient is exactly zero, step after step, while the run still has something to learn.

    It must have had a gradient before, or have only layers without one in front of it: a branch that
    the loss never used is not dead.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._names: tuple[str, ...] = ()
        self._running = np.zeros(0, dtype=np.int64)
        self._alive = np.zeros(0, dtype=bool)
        self._episode = Episode(config, FindingKind.DEAD_LAYER)

    def __call__(self, step: Step) -> Finding | None:
        table = step.report.layers
        column = table.column("gradient_norm")
        if column is None or step.report.applied is False:
            return None
        if table.names is not self._names and table.names != self._names:
            self._running = np.zeros(len(table), dtype=np.int64)
            self._alive = np.zeros(len(table), dtype=bool)
        self._names = table.names
        dead = self._dead(*column, execution_order(table), self._learning(step))
        if not self._episode.reports(step, len(dead) > 0):
            return None
        return step.finding(FindingKind.DEAD_LAYER, Quantity.GRADIENT, layer=table.names[dead[0]], value=0.0)

    def _dead(self, values: Values, observed: Mask, order: Values, learning: bool) -> list[int]:
        """The dead layers from the input on."""
        zero = observed & (values == 0)
        self._alive |= observed & ~zero
        if not (learning and zero.any()):
            self._running[:] = 0
            return []
        self._running = np.where(zero & ~np.isnan(order), self._running + 1, 0)
        long = self._running >= self._config.dead_steps
        if not long.any():
            return []
        # Nothing passes a dead layer, so that what lies in front of it has no gradient either.
        first_fed = np.where(observed & ~zero & ~np.isnan(order), order, np.inf).min()
        dead = np.flatnonzero(long & (self._alive | (order < first_fed)))
        return [int(index) for index in dead[np.argsort(order[dead])]]

    @staticmethod
    def _learning(step: Step) -> bool:
        return is_size(step.report.gradient_norm) or is_size(step.report.loss)


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
        usable = observed & (values > 0) & (values < np.inf)
        if not usable.any():
            return None
        order = np.where(usable, execution_order(table), np.inf)
        first = int(np.argmin(order))
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
        self._since = NEVER
        self._episode = Episode(config, FindingKind.OSCILLATION)

    def __call__(self, step: Step) -> Finding | None:
        config, progress = self._config, step.progress
        if step.observed("update_ratio") and (update := step.report.update_ratio) is not None:
            self._update.add(update, step.report.step)
        swings = (
            self._update.value > config.oscillation_update_ratio
            and progress.share > config.oscillation_loss_share
            and progress.swing_decades > config.oscillation_swing_decades
        )
        if not swings:
            self._since = NEVER
        elif self._since == NEVER:
            self._since = step.report.step
        lasts = self._since != NEVER and step.report.step - self._since >= config.oscillation_steps
        if not self._episode.reports(step, lasts, silent=not step.quiet):
            return None
        return step.finding(
            FindingKind.OSCILLATION, Quantity.LOSS, value=step.report.loss, baseline=step.baselines.usual("loss")
        )
