"""How far the largest values are from overflow, in decades and in steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradexporter.records import FLOAT32_MAX, Quantity, StepReport

STEPS_CAP = 1e6
"""Steps to overflow of a value that does not grow."""

_WIDE_FIELDS = {
    "gradient_max_abs": Quantity.GRADIENT,
    "momentum_max_abs": Quantity.OPTIMIZER_STATE,
    "second_moment_max_abs": Quantity.OPTIMIZER_STATE,
    "parameter_max_abs": Quantity.PARAMETER,
}
"""Values that are held to the largest float32: they are kept wide even where activations are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The value of a step that is nearest to the largest finite one of its dtype."""

    quantity: Quantity
    field: str
    value: float
    decades: float
    layer: str | None = None


def headrooms(report: StepReport) -> list[Headroom]:
    """One a quantity that the step observed with a finite value above zero."""
    found = [
        Headroom(quantity=quantity, field=name, value=value, decades=_decades(value, FLOAT32_MAX))
        for name, quantity in _WIDE_FIELDS.items()
        if is_size(value := getattr(report, name))
    ]
    activation = _activation(report)
    return [*found, activation] if activation else found


def _activation(report: StepReport) -> Headroom | None:
    value = report.activation_max_abs
    run = None
    if is_size(value) and is_size(report.dtype_max):
        run = Headroom(
            quantity=Quantity.ACTIVATION,
            field="activation_max_abs",
            value=value,
            decades=_decades(value, report.dtype_max),
        )
    activations, limits = report.layers.column("activation_max_abs"), report.layers.column("dtype_max")
    if activations is None or limits is None:
        return run
    with np.errstate(invalid="ignore"):
        known = activations[1] & limits[1] & (activations[0] > 0) & np.isfinite(activations[0]) & (limits[0] > 0)
    if not known.any():
        return run
    decades = np.full(len(known), np.inf)
    decades[known] = np.log10(limits[0][known]) - np.log10(activations[0][known])
    index = int(decades.argmin())
    if run is not None and run.decades <= decades[index]:
        return run
    return Headroom(
        quantity=Quantity.ACTIVATION,
        field="activation_max_abs",
        value=float(activations[0][index]),
        decades=float(decades[index]),
        layer=report.layers.names[index],
    )


def is_size(value: float | None) -> bool:
    """Whether a reading is finite and above zero, so that it has a logarithm."""
    return value is not None and 0 < value < math.inf


def _decades(value: float, limit: float) -> float:
    return math.log10(limit) - math.log10(value)


class Forecast:
    """Steps until a value overflows if its growth, in decades a step, keeps accelerating.

    Right within one step for the last four steps of a recorded cascade, an order of magnitude before.
    """

    __slots__ = ("growth", "last", "step")

    def __init__(self) -> None:
        self.last: float | None = None
        self.growth = 0.0
        self.step = 0

    def steps(self, value: float, decades: float, step: int) -> float:
        """The estimate after one more reading, at most STEPS_CAP."""
        u = math.log10(value)
        if self.last is None:
            self.last, self.step = u, step
            return STEPS_CAP
        growth = (u - self.last) / max(step - self.step, 1)
        ratio = min(max(growth / self.growth, 1.0), 4.0) if growth > 0 and self.growth > 0 else 1.0
        self.last, self.growth, self.step = u, growth, step
        if decades <= 0:
            return 0.0
        if growth <= 0:
            return STEPS_CAP
        first = growth * ratio
        if ratio - 1 < 1e-6:
            return min(decades / first, STEPS_CAP)
        return min(math.log1p(decades * (ratio - 1) / first) / math.log(ratio), STEPS_CAP)
