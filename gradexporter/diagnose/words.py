"""Diagnoses in sentences: the figures that speak for them, and what to do."""

from __future__ import annotations

import math

from gradexporter.detect import Step, ratio
from gradexporter.diagnose.incident import AT_ONCE, Incident
from gradexporter.diagnose.trail import Trail
from gradexporter.records import FLOAT32_MAX, Finding, FindingKind, Quantity

_NAMES = {
    "loss": "loss",
    "momentum_max_abs": "largest momentum",
    "parameter_max_abs": "largest parameter",
    "activation_max_abs": "largest activation",
}

_QUANTITIES = {
    Quantity.INPUT: "input",
    Quantity.TARGET: "target",
    Quantity.ACTIVATION: "activation",
    Quantity.LOSS: "loss",
    Quantity.GRADIENT: "gradient",
    Quantity.PARAMETER: "parameter",
    Quantity.OPTIMIZER_STATE: "optimizer state",
    Quantity.UPDATE: "update",
    Quantity.LEARNING_RATE: "learning rate",
    Quantity.LOSS_SCALE: "loss scale",
}

_SIZES = {
    Quantity.ACTIVATION: "largest activation",
    Quantity.OPTIMIZER_STATE: "largest value in the optimizer state",
    Quantity.UPDATE: "update as a share of the weights' norm",
}


def size(value: float) -> str:
    """Three digits, without trailing zeros."""
    return f"{value:.3g}"


def incident_evidence(incident: Incident, trail: Trail, step: Step) -> tuple[str, ...]:
    """What speaks for an incident's shape, in the order in which it happened."""
    said = list(incident.lead_in)
    if rate := trail.rate_before(incident.number):
        said.append(finding_evidence(rate))
    if batch := trail.batch_near(incident.number):
        said.append(finding_evidence(batch))
    if incident.opening.kind is not FindingKind.NONFINITE:
        said.append(finding_evidence(incident.opening))
        if incident.peak is not None and incident.peak.step != incident.opening.step:
            said.append(finding_evidence(incident.peak))
        said += _followers(step)
    if incident.nonfinite is not None:
        said.append(_nonfinite_evidence(incident))
    return tuple(dict.fromkeys(said))


def _followers(step: Step) -> list[str]:
    """What rose with the gradient, at its latest finite reading."""
    risen = []
    for series, name in _NAMES.items():
        decades, value = step.baselines.deviation(series), step.baselines.latest(series)
        factor = ratio(decades)
        if decades > 0.3 and factor is not None and value is not None:
            risen.append(f"{name} {size(value)}, {size(factor)} times its usual")
    return [f"Beside it: {'; '.join(risen)}."] if risen else []


def _nonfinite_evidence(incident: Incident) -> str:
    found = incident.nonfinite
    assert found is not None
    where = _QUANTITIES[found.quantity]
    if found.layer is not None and found.layer != found.quantity.value:
        where += f" of layer {found.layer}"
    text = f"Step {found.step}: the {where} is the first that is not finite"
    return text + (_MADE_BY.get(found.quantity, "") if incident.shape in AT_ONCE else "") + "."


_MADE_BY = {
    Quantity.INPUT: "; the model was fed it",
    Quantity.LOSS: "; all activations were finite, so the loss computation itself made it",
    Quantity.GRADIENT: "; loss and activations were finite, so a derivative made it",
    Quantity.ACTIVATION: "; its input was finite",
}


def finding_evidence(finding: Finding) -> str:
    """A finding with its figures, as one sentence."""
    layer = f"layer {finding.layer}" if finding.layer else "the model"
    value = "unknown" if finding.value is None else size(finding.value)
    in_range = finding.value is not None and finding.value < FLOAT32_MAX / 10
    usual = ""
    if finding.ratio is not None and finding.baseline is not None:
        usual = f", {size(finding.ratio)} times its usual {size(finding.baseline)}"
    at = f"Step {finding.step}: "
    quantity = _QUANTITIES[finding.quantity]
    match finding.kind:
        case FindingKind.GRADIENT_CASCADE if finding.quantity is Quantity.PARAMETER:
            return f"{at}largest parameter {value}{usual}, and still growing, while the gradient is saturated."
        case FindingKind.GRADIENT_SPIKE | FindingKind.GRADIENT_CASCADE:
            most = f"; {layer} stands out most" if finding.layer else ""
            return f"{at}gradient norm {value}{usual}{most}."
        case FindingKind.GRADIENT_GROWTH:
            return f"{at}the smoothed gradient norm has risen to {value}{usual}, and the loss rises with it."
        case FindingKind.OVERFLOW_IMMINENT if finding.quantity is Quantity.GRADIENT and in_range:
            return f"{at}gradient norm {value}, the square of which float32 can hardly hold."
        case FindingKind.OVERFLOW_IMMINENT:
            return f"{at}largest {quantity} {value}{usual}, within a decade of what its dtype can hold."
        case FindingKind.SCALE_COLLAPSE:
            return f"{at}loss scale {value} and no update applied: {layer} has a gradient that is not finite."
        case FindingKind.STALLED_UPDATES:
            return f"{at}updates change {value} of the weights' norm, though gradient and learning rate are there."
        case FindingKind.DEAD_LAYER:
            return f"{at}the gradient of {layer} has been exactly zero for many steps."
        case FindingKind.VANISHING_GRADIENT:
            most = size(finding.baseline or math.nan)
            return f"{at}gradient norm {value} in {layer}, the first, against {most} in the largest layer."
        case FindingKind.OSCILLATION:
            return f"{at}updates are large and the loss swings around {value} without falling."
        case FindingKind.OPTIMIZER_STATE_JUMP if finding.value == 0:
            return f"{at}the optimizer began from nothing though the run goes on: its state was not restored."
        case FindingKind.INPUT_NONFINITE:
            return f"{at}the input holds {value} elements that are not finite."
        case FindingKind.LEARNING_RATE_JUMP:
            return f"{at}learning rate {value}, from {size(finding.baseline or math.nan)} the step before."
        case FindingKind.INPUT_OUT_OF_RANGE:
            return f"{at}largest {quantity} {value}{usual}: the batch is out of range."
        case _:
            return f"{at}{_SIZES.get(finding.quantity, quantity)} {value}{usual}."
