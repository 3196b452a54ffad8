"""Where a step first went non-finite: execution order, the producer before those it infected."""

from __future__ import annotations

import math

import numpy as np

from gradexporter.records import NONFINITE_QUANTITIES, LayerTable, Mask, Quantity, StepReport, Values

_RUN_FIELDS = {
    Quantity.LOSS: ("loss",),
    Quantity.ACTIVATION: ("activation_max_abs",),
    Quantity.GRADIENT: ("gradient_norm", "gradient_max_abs"),
    Quantity.PARAMETER: ("parameter_max_abs", "parameter_norm"),
    Quantity.OPTIMIZER_STATE: ("momentum_max_abs", "second_moment_max_abs"),
    Quantity.INPUT: ("input_max_abs",),
}
"""Fields of StepReport whose non-finite reading says that the quantity is."""

_LAYER_COLUMNS = {
    Quantity.ACTIVATION: ("activation_max_abs", "activation_rms"),
    Quantity.GRADIENT: ("gradient_norm", "gradient_max_abs"),
    Quantity.PARAMETER: ("parameter_max_abs", "parameter_norm"),
    Quantity.OPTIMIZER_STATE: ("momentum_max_abs", "second_moment_max_abs"),
}
_COUNT_COLUMNS = {Quantity.ACTIVATION: "activation_nonfinite", Quantity.GRADIENT: "gradient_nonfinite"}


def nonfinite_quantities(report: StepReport) -> tuple[Quantity, ...]:
    """What is not finite in this step, in execution order; the gradient of a skipped update is left out."""
    return tuple(quantity for quantity in NONFINITE_QUANTITIES if _is_odd(report, quantity))


def _is_odd(report: StepReport, quantity: Quantity) -> bool:
    if quantity is Quantity.GRADIENT and report.applied is False:
        return False
    count = report.nonfinite.get(quantity.value)
    if count is not None and not count <= 0:
        return True
    values = (getattr(report, name) for name in _RUN_FIELDS[quantity])
    if any(value is not None and not math.isfinite(value) for value in values):
        return True
    layers = nonfinite_layers(report.layers, quantity)
    return layers is not None and bool(layers.any())


def nonfinite_layers(table: LayerTable, quantity: Quantity) -> Mask | None:
    """Which layers hold non-finite elements of a quantity; None where the table cannot say."""
    found: Mask | None = None
    counts = table.column(_COUNT_COLUMNS.get(quantity, ""))
    if counts is not None:
        found = counts[1] & ~(counts[0] <= 0)
    for name in _LAYER_COLUMNS.get(quantity, ()):
        column = table.column(name)
        if column is not None:
            odd = column[1] & ~np.isfinite(column[0])
            found = odd if found is None else found | odd
    return found


def producer(report: StepReport, quantity: Quantity) -> str | None:
    """The layer that brought a non-finite quantity into the step; None where the table cannot say.

    Backward runs from the last layer to the first, so of several non-finite gradients the layer
    that is executed last is the producer; everywhere else it is the one executed first.
    """
    layers = nonfinite_layers(report.layers, quantity)
    if layers is None or not layers.any():
        return None
    order = execution_order(report.layers)
    suspects = np.flatnonzero(layers)
    pick = np.argmax if quantity is Quantity.GRADIENT else np.argmin
    return report.layers.names[suspects[pick(order[suspects])]]


def execution_order(table: LayerTable) -> Values:
    """Rank of each layer in the forward pass; the order of the table for layers that did not say."""
    rows = np.arange(len(table), dtype=np.float64)
    column = table.column("execution_order")
    if column is None:
        return rows
    values, observed = column
    known = observed & np.isfinite(values)
    return np.where(known, values, len(table) + rows)
