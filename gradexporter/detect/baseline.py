"""What is usual for each series: a capped mean of log10 with a floor, in constant memory.

All series of a step, run level and per layer, are one vector, so that hundreds of layers cost a
handful of array operations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
"""Columns of LayerTable that have a baseline a layer; they follow the run's in the vector."""

_INDEX = {name: index for index, name in enumerate(RUN_SERIES)}

_STEADY = frozenset(("parameter_max_abs", "input_max_abs", "target_max_abs"))
_FLOORLESS = frozenset(("loss_scale",))
"""A loss scale halves for good; its baseline may follow it as far down as it goes."""
OF_UPDATES = frozenset(("gradient_norm", "update_ratio", "loss_scale"))
"""Series that mean nothing in a step whose update a loss scaler skipped."""

SMALLEST = 1e-12
"""Readings below it count as this much: what is smaller still differs by rounding alone."""

LARGEST_DECADES = 300.0
"""Ratios stop here, so that ten to their power stays finite."""


class Baselines:
    """The usual size of every series, and how far the latest reading lies above it, in decades.

    Only finite readings above zero are learned, and none as more than ``cap_decades`` above the usual,
    so that neither a spike nor a NaN moves or blinds a baseline. Until ``warmup_steps`` have passed
    since its first reading, a baseline is the median of its readings. A series that a step does not
    observe keeps its last deviation.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        # Share of the way to a reading that the mean moves, by the steps since the reading before.
        self._rates = 1.0 - (1.0 - 1.0 / config.tau_steps) ** np.arange(config.gap_limit_steps + 1)
        self._floors = [
            np.inf if name in _FLOORLESS else config.steady_floor_decades if name in _STEADY else config.floor_decades
            for name in RUN_SERIES
        ]
        self._allocate(())

    def _allocate(self, names: tuple[str, ...]) -> None:
        self.names = names
        size = len(RUN_SERIES) + len(LAYER_SERIES) * len(names)
        self._mean = np.zeros(size)
        self._top = np.zeros(size)
        self._base = np.zeros(size)
        self._deviation = np.full(size, np.nan)
        self._rise = np.full(size, np.nan)
        self._last = np.full(size, np.nan)
        self._last_step = np.zeros(size, dtype=np.int64)
        self._warm = np.zeros(size, dtype=bool)
        self._first_step = np.zeros(size, dtype=np.int64)
        self._count = np.zeros(size, dtype=np.int64)
        self._refused = np.zeros(size, dtype=np.int64)
        self._readings = np.full((self._config.warmup_steps, size), np.nan)
        self._floor = np.full(size, self._config.floor_decades)
        self._floor[: len(RUN_SERIES)] = self._floors

    def observe(self, report: StepReport, *, learn: bool = True) -> None:
        """Measures the step against the baselines, then learns from it; one in warm-up learns all the same."""
        names = report.layers.names
        if names and names is not self.names and names != self.names:
            self._follow(names)
        values, observed = self._vector(report)
        usable = observed & (values > 0) & (values < np.inf)
        cold = not self._warm.all()
        if cold:
            due = report.step - self._first_step >= self._config.warmup_steps
            self._warm |= due & (self._count >= self._config.warmup_readings)
        u = np.log10(np.maximum(np.where(usable, values, 1.0), SMALLEST))
        gap = np.minimum(np.maximum(report.step - self._last_step, 1), self._config.gap_limit_steps)
        self._base = np.maximum(self._mean, self._top - self._floor)
        above = u - self._base
        judged = usable & self._warm
        self._deviation = np.where(judged, above, self._deviation)
        self._rise = np.where(usable, u - self._last, np.nan)
        rate = np.where(judged, self._rates[gap] if learn else 0.0, 0.0)
        self._mean += rate * (np.minimum(u, self._base + self._config.cap_decades) - self._mean)
        faded = self._top - self._config.floor_decay_decades * gap
        self._top = np.where(judged, np.maximum(faded, self._mean), self._top)
        if cold:
            new = np.flatnonzero(usable & ~self._warm)
            if len(new):
                self._warm_up(new, u[new], above[new], report.step)
        self._last = np.where(usable, u, self._last)
        self._last_step = np.where(usable, report.step, self._last_step)

    def _warm_up(self, series: NDArray[np.intp], u: Values, above: Values, step: int) -> None:
        """Collects readings for the median, without those that jump out of what there is so far."""
        config = self._config
        self._first_step[series] = np.where(self._count[series] == 0, step, self._first_step[series])
        odd = (self._count[series] >= config.warmup_readings) & (above > config.warmup_jump_decades)
        self._deviation[series] = np.where(odd, above, np.nan)
        self._refused[series] += odd
        # As many refused as accepted: that is the level now, so the warm-up begins again.
        again = series[odd & (self._refused[series] >= self._count[series])]
        self._count[again] = self._refused[again] = 0
        self._readings[:, again] = np.nan
        series, u = series[~odd], u[~odd]
        self._readings[np.minimum(self._count[series], config.warmup_steps - 1), series] = u
        self._count[series] += 1
        middle = np.minimum(self._count[series], config.warmup_steps) // 2
        middle = np.minimum(middle, self._count[series] - 1)
        ordered = np.sort(self._readings[:, series], axis=0)
        self._mean[series] = self._top[series] = ordered[middle, np.arange(len(series))]

    def _vector(self, report: StepReport) -> tuple[Values, Mask]:
        skipped = report.applied is False
        run = [None if skipped and name in OF_UPDATES else getattr(report, name) for name in RUN_SERIES]
        values = [np.array([np.nan if value is None else value for value in run], dtype=np.float64)]
        observed = [~np.isnan(values[0])]
        for name in LAYER_SERIES:
            column = report.layers.column(name)
            if column is None or (skipped and name in OF_UPDATES):
                values.append(np.zeros(len(self.names)))
                observed.append(np.zeros(len(self.names), dtype=bool))
            else:
                values.append(column[0])
                observed.append(column[1])
        return np.concatenate(values), np.concatenate(observed)

    def _follow(self, names: tuple[str, ...]) -> None:
        """Goes over to another set of layers and keeps the baselines of those that stay."""
        before = dict(vars(self))
        row = {name: index for index, name in enumerate(self.names)}
        kept = [(index, row[name]) for index, name in enumerate(names) if name in row]
        source = list(range(len(RUN_SERIES)))
        target = list(source)
        for block in range(len(LAYER_SERIES)):
            source += [len(RUN_SERIES) + block * len(self.names) + old for _, old in kept]
            target += [len(RUN_SERIES) + block * len(names) + new for new, _ in kept]
        self._allocate(names)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name not in ("_rates", "_floor"):
                array[..., target] = before[name][..., source]

    def deviation(self, series: str) -> float:
        """Decades above the usual of a run-level series at its last reading; NaN where none is known."""
        return float(self._deviation[_INDEX[series]])

    def rise(self, series: str) -> float:
        """Decades since the reading before, or since what was usual in the run that is continued; NaN without one."""
        return float(self._rise[_INDEX[series]])

    def latest(self, series: str) -> float | None:
        """The reading that ``deviation`` is about, in its own unit; None before the first."""
        last = float(self._last[_INDEX[series]])
        return None if math.isnan(last) else 10.0**last

    def usual(self, series: str) -> float | None:
        """The baseline of a run-level series in its own unit; None before its first reading."""
        index = _INDEX[series]
        return 10.0 ** float(self._base[index]) if self._count[index] else None

    def level(self, series: str) -> float:
        """log10 of the baseline of a run-level series; NaN before its first reading."""
        index = _INDEX[series]
        return float(self._base[index]) if self._count[index] else math.nan

    def is_warm(self, series: str) -> bool:
        """Whether the baseline of a run-level series is past its warm-up."""
        return bool(self._warm[_INDEX[series]])

    def is_known(self, series: str) -> bool:
        """Whether a run-level series was ever observed."""
        return bool(self._count[_INDEX[series]])

    def layer_deviation(self, series: str) -> Values:
        """Decades above the usual by layer, in the order of ``names``; NaN where none is known."""
        return self._deviation[self._layers(series)]

    def layer_is_warm(self, series: str) -> Mask:
        """Which layers' baselines are past their warm-up, in the order of ``names``."""
        return self._warm[self._layers(series)]

    def layer_usual(self, series: str, layer: int) -> float:
        """The baseline of the layer with this index in its own unit."""
        return float(10.0 ** self._base[self._layers(series)][layer])

    def _layers(self, series: str) -> slice:
        begin = len(RUN_SERIES) + LAYER_SERIES.index(series) * len(self.names)
        return slice(begin, begin + len(self.names))

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a series that is still in warm-up is left out and begins again."""
        warm = np.flatnonzero(self._warm).tolist()
        series = {
            self._key(index): [float(self._mean[index]), float(self._top[index]), int(self._last_step[index])]
            for index in warm
        }
        return {"layers": list(self.names), "series": series}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with saved baselines, past warm-up from the first step on."""
        self._allocate(tuple(state["layers"]))
        index = {self._key(index): index for index in range(len(self._mean))}
        for key, (mean, top, last_step) in state["series"].items():
            if not (math.isfinite(mean) and math.isfinite(top)):
                raise ValueError(f"a baseline must be finite, {key} is not")
            at = index[key]
            self._mean[at], self._top[at], self._last_step[at] = mean, top, last_step
            self._last[at] = mean
            self._count[at] = self._config.warmup_readings
            self._warm[at] = True

    def _key(self, index: int) -> str:
        if index < len(RUN_SERIES):
            return RUN_SERIES[index]
        block, row = divmod(index - len(RUN_SERIES), len(self.names))
        return f"{LAYER_SERIES[block]}:{self.names[row]}"
