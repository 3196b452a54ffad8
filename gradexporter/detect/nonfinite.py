"""What went non-finite in a step, and where first: execution order, producers before propagators."""

from __future__ import annotations

import math

import numpy as np

from gradexporter.records import (
    NONFINITE_QUANTITIES,
    ROOT_LAYER,
    FirstNonfinite,
    LayerTable,
    Mask,
    Quantity,
    StepReport,
    Values,
)

_RUN_FIELDS = {
    Quantity.INPUT: ("input_max_abs",),
    Quantity.ACTIVATION: ("activation_max_abs",),
    Quantity.LOSS: ("loss",),
    Quantity.GRADIENT: ("gradient_norm", "gradient_max_abs"),
    Quantity.PARAMETER: ("parameter_max_abs", "parameter_norm"),
    Quantity.OPTIMIZER_STATE: ("momentum_max_abs", "second_moment_max_abs"),
}
_LAYER_COLUMNS = {
    Quantity.ACTIVATION: ("activation_nonfinite", "activation_max_abs", "activation_rms"),
    Quantity.GRADIENT: ("gradient_nonfinite", "gradient_max_abs", "gradient_norm"),
    Quantity.PARAMETER: ("parameter_max_abs", "parameter_norm"),
    Quantity.OPTIMIZER_STATE: ("momentum_max_abs", "second_moment_max_abs"),
}
"""Readings that tell whether a quantity is finite; a ``_nonfinite`` column is a count."""

_ALL_FIELDS = tuple(name for names in _RUN_FIELDS.values() for name in names)
_ALL_COLUMNS = tuple(name for names in _LAYER_COLUMNS.values() for name in names)


def nonfinite_quantities(report: StepReport) -> tuple[Quantity, ...]:
    """What is not finite in this step, in execution order.

    The gradient of a skipped update does not count: that is how a loss scaler finds its scale.
    """
    if _is_plainly_finite(report):
        return ()
    return tuple(quantity for quantity in NONFINITE_QUANTITIES if _is_nonfinite(report, quantity))


def _is_plainly_finite(report: StepReport) -> bool:
    """Whether counts of zero and finite sums say so at a glance, as in nearly every step."""
    if any(report.nonfinite.values()):
        return False
    total = sum([value for name in _ALL_FIELDS if (value := getattr(report, name)) is not None])
    for name in _ALL_COLUMNS:
        column = report.layers.columns.get(name)
        if column is not None:
            summed = float(column[0].sum())
            if name.endswith("_nonfinite") and summed != 0:
                return False
            total += summed
    return math.isfinite(total)


def _is_nonfinite(report: StepReport, quantity: Quantity) -> bool:
    if quantity is Quantity.GRADIENT and report.applied is False:
        return False
    count = report.nonfinite.get(quantity.value, 0)
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
    for name in _LAYER_COLUMNS.get(quantity, ()):
        column = table.column(name)
        if column is not None:
            values, observed = column
            odd = ~(values <= 0) if name.endswith("_nonfinite") else ~np.isfinite(values)
            found = odd & observed if found is None else found | (odd & observed)
    return found


def first_nonfinite(report: StepReport, quantities: tuple[Quantity, ...]) -> FirstNonfinite | None:
    """Where a step that is not finite first went so; None if nothing but its input is not finite.

    A non-finite input that no layer, loss or weight picked up has been masked, and harms nothing.
    """
    if not any(quantity is not Quantity.INPUT for quantity in quantities):
        return None
    quantity = quantities[0]
    return FirstNonfinite(
        step=report.step, layer=producer(report.layers, quantity) or quantity.value, quantity=quantity
    )


def producer(table: LayerTable, quantity: Quantity) -> str | None:
    """The layer that brought a non-finite quantity into the step; None where the table cannot say.

    Backward runs from the last layer to the first, so of several non-finite gradients the layer that
    is executed last is the producer; everywhere else it is the one executed first.
    """
    layers = nonfinite_layers(table, quantity)
    if layers is None or not layers.any():
        return None
    order = execution_order(table)
    suspects = np.flatnonzero(layers)
    ran = suspects[np.isfinite(order[suspects])]
    if len(ran):
        suspects = ran
    else:
        order = np.arange(len(table), dtype=np.float64)
    if quantity is not Quantity.GRADIENT:
        return table.names[int(suspects[np.argmin(order[suspects])])]
    # A parent returns after its children, though its own weights may have acted before them.
    names = {table.names[index] for index in suspects}
    parents = {name[:at] for name in names for at in range(len(name)) if name[at] == "."} | {ROOT_LAYER}
    leaves = [index for index in suspects if table.names[index] not in parents]
    return table.names[int(max(leaves or suspects, key=lambda index: order[index]))]


def execution_order(table: LayerTable) -> Values:
    """Rank of each layer in the forward pass, NaN for one that did not run; else the order of the table."""
    column = table.column("execution_order")
    if column is None:
        return np.arange(len(table), dtype=np.float64)
    values, observed = column
    return np.where(observed, values, np.nan)
