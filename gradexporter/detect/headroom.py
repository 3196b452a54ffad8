"""How far the largest values are from overflow, in decades and in steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from gradexporter.records import FLOAT32_MAX, Quantity, StepReport

STEPS_CAP = 1e6
"""Steps to overflow of a value that does not grow."""

_WIDE = {
    "gradient_max_abs": Quantity.GRADIENT,
    "momentum_max_abs": Quantity.OPTIMIZER_STATE,
    "second_moment_max_abs": Quantity.OPTIMIZER_STATE,
    "parameter_max_abs": Quantity.PARAMETER,
}
"""Values that are held to the largest float32: they are kept wide even where activations are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How near one quantity of a step is to the largest finite value of its dtype."""

    quantity: Quantity
    series: str
    value: float
    decades: float
    layer: str | None


def headrooms(report: StepReport) -> list[Headroom]:
    """One a quantity that has a finite value above zero in this step."""
    found = []
    for series, quantity in _WIDE.items():
        value = getattr(report, series)
        if is_size(value):
            decades = math.log10(FLOAT32_MAX) - math.log10(value)
            found.append(Headroom(quantity=quantity, series=series, value=value, decades=decades, layer=None))
    return found + _activation(report)


def _activation(report: StepReport) -> list[Headroom]:
    """Of the run's largest activation or of the layer whose own dtype is nearer, if one says so."""
    value, layer, decades = report.activation_max_abs, None, math.inf
    if is_size(value) and is_size(report.dtype_max):
        decades = math.log10(report.dtype_max) - math.log10(value)
    activations, limits = report.layers.column("activation_max_abs"), report.layers.column("dtype_max")
    if activations is not None and limits is not None:
        usable = activations[1] & limits[1] & (activations[0] > 0) & np.isfinite(activations[0]) & (limits[0] > 0)
        rooms = np.log10(np.where(usable, limits[0], np.inf)) - np.log10(np.where(usable, activations[0], 1.0))
        index = int(rooms.argmin()) if len(rooms) else -1
        if index >= 0 and rooms[index] < decades:
            value, layer, decades = float(activations[0][index]), report.layers.names[index], float(rooms[index])
    if value is None or not math.isfinite(decades):
        return []
    return [
        Headroom(quantity=Quantity.ACTIVATION, series="activation_max_abs", value=value, decades=decades, layer=layer)
    ]


def is_size(value: float | None) -> TypeGuard[float]:
    """Whether a reading is finite and above zero, so that it has a logarithm."""
    return value is not None and 0 < value < math.inf


class Forecast:
    """Steps until a value overflows if its growth, in decades a step, keeps accelerating.

    Right within one step for the last four steps of a recorded cascade, an order of magnitude earlier.
    """

    __slots__ = ("_growth", "_last", "_step")

    def __init__(self) -> None:
        self._last: float | None = None
        self._growth = 0.0
        self._step = 0

    def steps(self, headroom: Headroom, step: int) -> float:
        """The estimate after one more reading, at most STEPS_CAP."""
        u = math.log10(headroom.value)
        if self._last is None:
            self._last, self._step = u, step
            return STEPS_CAP
        growth = (u - self._last) / max(step - self._step, 1)
        ratio = min(max(growth / self._growth, 1.0), 4.0) if growth > 0 and self._growth > 0 else 1.0
        self._last, self._growth, self._step = u, growth, step
        if headroom.decades <= 0:
            return 0.0
        coming = growth * ratio
        if coming <= headroom.decades / STEPS_CAP:
            return STEPS_CAP
        if ratio < 1.000001:
            return headroom.decades / coming
        return math.log1p(headroom.decades * (ratio - 1) / coming) / math.log(ratio)
