"""What is usual for each series: a capped mean of log10 with a floor, in constant memory.

All series of a step, run level and per layer, are one vector, so that hundreds of layers cost a
handful of array operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradexporter.config import JudgeConfig
from gradexporter.records import Mask, StepReport, Values

RUN_SERIES = (
    "gradient_norm",
    "activation_max_abs",
    "momentum_max_abs",
    "second_moment_max_abs",
    "parameter_max_abs",
    "update_ratio",
    "loss",
    "input_max_abs",
    "target_max_abs",
    "loss_scale",
)
"""Fields of StepReport that have a baseline, in the order of the vector."""

LAYER_SERIES = ("gradient_norm", "activation_max_abs")
"""Columns of LayerTable that have a baseline a layer, behind the run's in the vector."""

STEADY_SERIES = frozenset(("parameter_max_abs", "input_max_abs", "target_max_abs"))
"""Series that hardly move from step to step, so that a third of a decade is news."""

UPDATED_SERIES = frozenset(("gradient_norm", "update_ratio", "loss_scale"))
"""Series that mean nothing in a step whose update a loss scaler skipped."""

SMALLEST = 1e-12
"""Readings below it count as this much: what is smaller still differs by rounding alone."""

_ARRAYS = ("mean", "top", "deviation", "count", "refused", "first_step", "last_step")


class Baselines:
    """The usual size of every series, and how far the latest reading lies above it, in decades.

    Only finite readings above zero are learned, and none as more than ``cap_decades`` above the
    usual, so that neither a spike nor a NaN moves or blinds a baseline. Until ``warmup_steps`` have
    passed a baseline is the median of its readings. A series that a step does not observe keeps its
    last deviation.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._names: tuple[str, ...] = ()
        self._allocate(len(RUN_SERIES))
        # How much of the way to a reading the mean moves, by the steps since the reading before.
        gaps = np.arange(config.gap_limit_steps + 1)
        self._rates = 1.0 - (1.0 - 1.0 / config.tau_steps) ** gaps

    def _allocate(self, size: int) -> None:
        self.mean = np.zeros(size)
        """Mean of log10; in warm-up the median so far."""
        self.top = np.zeros(size)
        self.deviation = np.full(size, np.nan)
        """Decades above the baseline at the last reading; NaN where none is known."""
        self.base = np.zeros(size)
        """The baseline that ``deviation`` was measured from."""
        self.count = np.zeros(size, dtype=np.int64)
        self.refused = np.zeros(size, dtype=np.int64)
        self.first_step = np.zeros(size, dtype=np.int64)
        self.last_step = np.zeros(size, dtype=np.int64)
        self.warm = np.zeros(size, dtype=bool)
        """Past warm-up."""
        self.readings = np.full((self._config.warmup_steps, size), np.nan)
        floors = [
            self._config.steady_floor_decades if name in STEADY_SERIES else self._config.floor_decades
            for name in RUN_SERIES
        ]
        self.floor = np.full(size, self._config.floor_decades)
        self.floor[: len(RUN_SERIES)] = floors

    def observe(self, report: StepReport) -> None:
        """Measures the step against the baselines, then learns from it."""
        self._follow(report.layers.names)
        values, observed = self._vector(report)
        with np.errstate(invalid="ignore", over="ignore"):
            usable = observed & (values > 0) & (values < np.inf)
        u = np.log10(np.maximum(np.where(usable, values, 1.0), SMALLEST))
        gap = np.clip(report.step - self.last_step, 1, self._config.gap_limit_steps)
        self.base = np.maximum(self.mean, self.top - self.floor)
        raw = u - self.base
        warm = self.warm & usable
        self.deviation = np.where(warm, raw, self.deviation)
        step = np.where(warm, self._rates[gap], 0.0)
        self.mean += step * (np.minimum(u, self.base + self._config.cap_decades) - self.mean)
        self.top = np.where(warm, np.maximum(self.top - self._config.floor_decay_decades * gap, self.mean), self.top)
        if not self.warm.all():
            self._warm_up(np.flatnonzero(usable & ~self.warm), u, raw, report.step)
        self.last_step = np.where(usable, report.step, self.last_step)

    def _warm_up(self, cold: np.ndarray[Any, np.dtype[np.int64]], u: Values, raw: Values, step: int) -> None:
        if not len(cold):
            return
        config = self._config
        fresh = self.count[cold] == 0
        self.first_step[cold[fresh]] = step
        known = self.count[cold] >= config.warmup_readings
        due = step - self.first_step[cold] >= config.warmup_steps
        graduating = cold[known & due]
        if len(graduating):
            # Warm from this step on, and this step is already measured against the median.
            self.warm[graduating] = True
            self.deviation[graduating] = raw[graduating]
            self.mean[graduating] += self._rates[1] * (
                np.minimum(u[graduating], self.mean[graduating] + config.cap_decades) - self.mean[graduating]
            )
            self.top[graduating] = self.mean[graduating]
        cold, known = cold[~(known & due)], known[~(known & due)]
        odd = known & (raw[cold] > config.warmup_jump_decades)
        self.deviation[cold] = np.where(odd, raw[cold], np.nan)
        self.refused[cold[odd]] += 1
        # As many refused as accepted: the new level is the usual one, so begin again.
        restart = cold[odd][self.refused[cold[odd]] >= self.count[cold[odd]]]
        self.count[restart] = self.refused[restart] = 0
        self.readings[:, restart] = np.nan
        accepted = cold[~odd]
        slot = np.minimum(self.count[accepted], config.warmup_steps - 1)
        self.readings[slot, accepted] = u[accepted]
        self.count[accepted] += 1
        ordered = np.sort(self.readings[:, accepted], axis=0)
        middle = (np.minimum(self.count[accepted], config.warmup_steps) - 1) // 2
        self.mean[accepted] = self.top[accepted] = ordered[middle, np.arange(len(accepted))]

    def _vector(self, report: StepReport) -> tuple[Values, Mask]:
        run = [getattr(report, name) for name in RUN_SERIES]
        if report.applied is False:
            run = [None if name in UPDATED_SERIES else value for name, value in zip(RUN_SERIES, run, strict=True)]
        parts = [np.array([np.nan if value is None else value for value in run], dtype=np.float64)]
        masks = [np.array([value is not None for value in run])]
        layers = len(self._names)
        for name in LAYER_SERIES:
            column = report.layers.column(name)
            if column is None or (report.applied is False and name in UPDATED_SERIES):
                parts.append(np.full(layers, np.nan))
                masks.append(np.zeros(layers, dtype=bool))
            else:
                parts.append(column[0])
                masks.append(column[1])
        return np.concatenate(parts), np.concatenate(masks)

    def _follow(self, names: tuple[str, ...]) -> None:
        """Keeps the baselines of layers that are still there when the table's layers change."""
        if names is self._names or names == self._names or not names:
            return
        before = {name: index for index, name in enumerate(self._names)}
        old_size, run = len(self._names), len(RUN_SERIES)
        old = {name: getattr(self, name) for name in (*_ARRAYS, "warm")}
        readings = self.readings
        self._names = names
        self._allocate(run + len(LAYER_SERIES) * len(names))
        pairs = [(new, before[name]) for new, name in enumerate(names) if name in before]
        source, target = list(range(run)), list(range(run))
        for block in range(len(LAYER_SERIES)):
            source += [run + block * old_size + index for _, index in pairs]
            target += [run + block * len(names) + index for index, _ in pairs]
        for name, array in old.items():
            getattr(self, name)[target] = array[source]
        self.readings[:, target] = readings[:, source]

    def run_deviation(self, series: str) -> float | None:
        """Decades above the usual of a run-level series; None where nothing is known yet."""
        value = float(self.deviation[RUN_SERIES.index(series)])
        return None if value != value else value

    def run_usual(self, series: str) -> float | None:
        """The baseline of a run-level series in its own unit; None before its first reading."""
        index = RUN_SERIES.index(series)
        return 10.0 ** float(self.base[index]) if self.count[index] else None

    def layer_deviation(self, series: str) -> Values:
        """Decades above the usual by layer, in the order of the table; NaN where nothing is known yet."""
        begin = len(RUN_SERIES) + LAYER_SERIES.index(series) * len(self._names)
        return self.deviation[begin : begin + len(self._names)]

    def layer_base(self, series: str) -> Values:
        """log10 of the baseline by layer."""
        begin = len(RUN_SERIES) + LAYER_SERIES.index(series) * len(self._names)
        return self.base[begin : begin + len(self._names)]

    run_names = RUN_SERIES

    def run_ratio(self, series: str) -> float | None:
        """How many times its usual size a run-level series is."""
        deviation = self.run_deviation(series)
        return None if deviation is None else 10.0 ** min(deviation, 300.0)

    def is_warm(self, series: str) -> bool:
        """Whether a run-level baseline is past warm-up."""
        return bool(self.warm[RUN_SERIES.index(series)])

    def is_seen(self, series: str) -> bool:
        """Whether a run-level series was ever observed."""
        return bool(self.count[RUN_SERIES.index(series)])
