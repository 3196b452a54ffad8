"""What to do about each failure shape, in the order in which to do it."""

from __future__ import annotations

from gradexporter.diagnose.incident import Incident
from gradexporter.records import Finding, FindingKind, Quantity, Severity, Shape


def incident_advice(incident: Incident) -> tuple[str, ...]:
    """What to do about an open incident."""
    usual = incident.usual_norm
    clip = f" or clip the gradient norm at about {usual:.2g}" if usual else " or clip the gradient norm"
    restart = _restart(incident.clean_step)
    if incident.severity is Severity.WARNING:
        keep = "" if incident.clean_step is None else f", and keep the one of step {incident.clean_step}"
        return (
            f"Wait: most spikes pass within a few steps. Write no checkpoint over a good one meanwhile{keep}.",
            f"If it comes back, lower the learning rate{clip}, and look at the data of step {incident.since_step}.",
        )
    if incident.nonfinite is not None and incident.shape in _OPERATION:
        return (*_operation(incident.nonfinite), _after_nonfinite(incident))
    batch = f"step {incident.opening.step}"
    advice = {
        Shape.SPIKE_CASCADE: (
            f"Lower the learning rate tenfold{clip}. Leaving out the batch does not help: the weights amplify any.",
            f"{restart} Start with fresh optimizer state: the momentum carries the spike.",
        ),
        Shape.EXPLODING_GRADIENT: (
            f"This is a trend and no single batch: lower the learning rate{clip}, and check momentum and weight decay.",
            restart,
        ),
        Shape.BAD_BATCH: (
            f"Look at the batch of {batch}: its inputs or targets are out of range. Clamp or leave out such samples.",
            f"Clip the gradient norm, so that one batch cannot move the weights that far. {restart}",
        ),
        Shape.BAD_INPUT: (
            f"The batch of step {incident.since_step} holds values that are not finite: check what made it, from the "
            "file to the augmentation, and leave such samples out before they reach the model.",
            _after_nonfinite(incident),
        ),
        Shape.HALF_PRECISION_OVERFLOW: (
            f"Train in bfloat16, or keep {incident.culprit} in float32: activations are too large for half precision.",
            f"A lower learning rate, weight decay or a normalisation in front of it keeps activations small. {restart}",
        ),
        Shape.RESUME_MISMATCH: RESUME_ADVICE,
    }
    return advice.get(incident.shape, (restart,))


_OPERATION = (Shape.NAN_FROM_START, Shape.UNDEFINED_OPERATION)


def _operation(found: Finding) -> tuple[str, ...]:
    layer = f"layer {found.layer}"
    trace = "torch.autograd.set_detect_anomaly(True) names the operation if the step is run again."
    match found.quantity:
        case Quantity.INPUT:
            return ("The very input is not finite: check the data pipeline before the model.",)
        case Quantity.LOSS:
            return (
                "Look in the loss for log(0), 0/0, a mean over no element (all labels ignored) or an overflowing exp: "
                "add an epsilon, clamp the argument, or leave such batches out.",
                trace,
            )
        case Quantity.GRADIENT:
            return (
                f"Look between {layer} and the loss for a derivative that is infinite where the value is not: sqrt or "
                "norm at 0, acos or asin at 1, log at 0, torch.where over a branch that is not finite.",
                trace,
            )
        case Quantity.ACTIVATION:
            return (
                f"Look at {layer} and what feeds it: log or division by 0, a variance of one element, a softmax over a "
                "row that is masked throughout, inputs that were never scaled.",
                trace,
            )
        case _:
            return (
                "Gradients were finite and the update was not: check the optimizer's epsilon (1e-8 is 0 in half "
                "precision), the learning rate and weight decay.",
            )


def _after_nonfinite(incident: Incident) -> str:
    if incident.shape is Shape.NAN_FROM_START:
        return "Nothing was learned yet: mend it and start again."
    restart = _restart(incident.clean_step)
    return f"The weights are lost. {restart}" if incident.weights_lost else f"If the weights are lost too: {restart}"


def finding_advice(finding: Finding, clean_step: int | None) -> tuple[str, ...]:
    """What to do about a finding that is a diagnosis by itself."""
    layer = f"layer {finding.layer}" if finding.layer else "the layer with the largest value"
    restart = _restart(clean_step)
    lower = "Lower the learning rate or clip the gradient norm before it becomes a cascade."
    advice = {
        FindingKind.SCALE_COLLAPSE: (
            f"Updates are skipped and nothing is learned, however good the loss looks. Find what makes the gradient of "
            f"{layer} non-finite at any scale: sqrt or norm at 0, log at 0, an overflow in the loss.",
            f"A higher scale does not help. {restart}",
        ),
        FindingKind.STALLED_UPDATES: (
            "Check the learning rate and its schedule, and that the optimizer holds the parameters that are trained.",
            "In half precision small updates round away: keep float32 master weights.",
        ),
        FindingKind.DEAD_LAYER: (
            f"{layer[0].upper()}{layer[1:]} passes no gradient and will not recover by itself: its units are all off, "
            "most often after an outlier or too large an update.",
            f"{restart} Lower the learning rate, or use an activation with a slope below zero, such as LeakyReLU.",
        ),
        FindingKind.VANISHING_GRADIENT: (
            "The first layers learn nothing. Use residual connections or normalisation, an activation that does not "
            "saturate, or another initialisation; a higher learning rate does not help.",
        ),
        FindingKind.OSCILLATION: (
            "Lower the learning rate three- to tenfold: the updates overshoot, and the run learns nothing.",
        ),
        FindingKind.INPUT_NONFINITE: (
            "Check what made the batch; if the model masks such values on purpose, no action is needed.",
        ),
        FindingKind.LOSS_SPIKE: (
            f"Look at the data from step {finding.step} on: an outlier, or a new source of data. The gradient is calm.",
        ),
        FindingKind.UPDATE_JUMP: (
            f"Check the learning rate and, with Adam, a second moment that is too small. {lower}",
        ),
        FindingKind.OPTIMIZER_STATE_JUMP: (
            f"The gradient does not explain it: check that the optimizer state was restored whole. {lower}",
        ),
    }
    return advice.get(finding.kind, (lower, f"Write no checkpoint over a good one meanwhile. {restart}"))


RESUME_ADVICE = (
    "Compare with the run before the restart: optimizer state, learning rate schedule, loss scaler, random state and "
    "position in the data must be restored, not the weights alone.",
    "Then continue from the same checkpoint once more; what was written since carries the mistake. Where the "
    "change was meant, nothing is to be done.",
)

SURVIVED_ADVICE = "It passed and the weights stayed finite: no restart is needed."

RECOVERED_ADVICE = ("No action: it passed. If it comes back often, lower the learning rate or clip the gradient norm.",)


def _restart(clean_step: int | None) -> str:
    if clean_step is None:
        return "No step before it was healthy: restart from the beginning, or from a checkpoint of an earlier attempt."
    return f"Restart from a checkpoint of step {clean_step} or earlier; later ones carry the damage."
