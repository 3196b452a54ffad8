"""The catalogue: every series once, with its name, unit, help and how it is read.

Exposition, OTLP names, dashboards, rules and the README table derive from ``CATALOG``; outside this
package no string starts with the prefix of a series.
"""

from __future__ import annotations

import platform

from gradexporter import __version__
from gradexporter.exposure import View
from gradexporter.metrics import read
from gradexporter.metrics.spec import IDENTITY_LABELS as IDENTITY_LABELS
from gradexporter.metrics.spec import PREFIX as PREFIX
from gradexporter.metrics.spec import Kind as Kind
from gradexporter.metrics.spec import Labels as Labels
from gradexporter.metrics.spec import MetricSpec as MetricSpec
from gradexporter.metrics.spec import Rows as Rows
from gradexporter.metrics.spec import Sample as Sample
from gradexporter.metrics.spec import Section as Section
from gradexporter.metrics.spec import Unit as Unit
from gradexporter.metrics.spec import counter, gauge
from gradexporter.records import NONFINITE_QUANTITIES, FindingKind, Quantity, Shape

RUN, LOSS, GLOBAL, LAYER = Section.RUN, Section.LOSS, Section.GLOBAL, Section.LAYER
JUDGEMENT, CHECKPOINT, SELF = Section.JUDGEMENT, Section.CHECKPOINT, Section.SELF


def _first_place(view: View) -> list[Sample]:
    first = read.first_nonfinite(view.snapshot)
    return [] if first is None else [((first.layer, first.quantity.value), 1.0)]


def _layer_gauge(column: str, help: str, *, stable: bool = False) -> MetricSpec:
    return gauge(LAYER, f"layer_{column}", help, read.layer(column), "layer", stable=stable)


def _layer_counter(column: str, help: str) -> MetricSpec:
    return counter(LAYER, f"layer_{column}", help, read.layer_total(column), "layer")


# -- run ------------------------------------------------------------------------------------------

BUILD_INFO = gauge(
    RUN,
    "build_info",
    "1, with the versions of gradexporter and Python.",
    lambda view: [((__version__, platform.python_version()), 1.0)],
    "version",
    "python",
    stable=True,
)
RUN_INFO = MetricSpec(
    section=RUN,
    path="run_info",
    kind=Kind.GAUGE,
    help="1, with what identifies the run, and norms=share on a rank whose norms are those of its share of the model; "
    "routing labels set by the user appear here too.",
    read=lambda view: [(tuple(read.run_info_labels(view).values()), 1.0)],
    labels=("attempt", "local_rank", "world_size", "model", "norms", "optimizer", "paging"),
    stable=True,
)
RUN_PHASE = gauge(
    RUN,
    "run_phase",
    "1 for the phase that the run is in, 0 for the others.",
    read.words(("train", "eval", "checkpoint"), lambda run, phase: float(run.phase == phase)),
    "phase",
)
RUN_ENDED = gauge(
    RUN,
    "run_ended",
    "1 for the way in which the run ended as its own process saw it, 0 while it goes on.",
    read.words(("closed", "exception", "signal"), lambda run, reason: float(run.ended == reason)),
    "reason",
    stable=True,
)
STEP = gauge(
    RUN,
    "step",
    "Number of the last optimizer update, applied or skipped.",
    read.latest(lambda report: report.step),
    stable=True,
)
STEPS_TOTAL = counter(
    RUN,
    "steps",
    "Optimizer updates since the process started, by whether a loss scaler skipped them.",
    lambda view: [(("applied",), view.snapshot.steps_applied), (("skipped",), view.snapshot.steps_skipped)],
    "outcome",
    stable=True,
)
STEP_SECONDS_TOTAL = counter(
    RUN,
    "step.seconds",
    "Seconds spent in steps; its rate over the rate of steps is the step time.",
    read.one(lambda view: view.snapshot.step_seconds),
    unit=Unit.SECONDS,
    stable=True,
)
LAST_STEP_TIMESTAMP = gauge(
    RUN,
    "last_step.timestamp",
    "Unix time at which the last step closed.",
    read.latest(lambda report: report.timestamp),
    unit=Unit.SECONDS,
    stable=True,
)
LAST_HEALTHY_STEP = gauge(
    RUN,
    "last_healthy_step",
    "Last step that this rank found healthy; a checkpoint up to it is worth restarting from.",
    read.smallest("last_healthy_step"),
    stable=True,
)

# -- loss, rate, scale ----------------------------------------------------------------------------

LOSS_VALUE = gauge(
    LOSS,
    "loss",
    "Mean loss of the last step on this rank, NaN if one of its parts was.",
    read.largest("loss"),
    stable=True,
)
LEARNING_RATE = gauge(
    LOSS,
    "learning_rate",
    "Learning rate of each parameter group in the last step; groups of a second optimizer are 1.0, 1.1 and so on.",
    lambda view: [((group,), rate) for group, rate in view.learning_rates],
    "group",
)
LOSS_SCALE = gauge(
    LOSS, "loss_scale", "Scale that a gradient scaler multiplied the loss by.", read.largest("loss_scale")
)
CLIP_FACTOR = gauge(
    LOSS,
    "clip_factor",
    "What clipping multiplied the gradient of the last step by, 1 if it left it alone.",
    read.smallest("clip_factor"),
)
CLIPPED_STEPS_TOTAL = counter(
    LOSS,
    "clipped_steps",
    "Steps whose gradient clipping made smaller.",
    read.one(lambda view: view.snapshot.clipped_steps),
)

# -- global magnitudes ----------------------------------------------------------------------------

GRADIENT_NORM = gauge(
    GLOBAL,
    "gradient_norm",
    "L2 norm of this rank's gradient, or share of it, in the last step, before clipping and divided by the loss scale.",
    read.largest("gradient_norm"),
    stable=True,
)
GRADIENT_NORM_PEAK = gauge(
    GLOBAL,
    "gradient_norm_peak",
    "Largest gradient norm of this rank in the 30 to 60 seconds up to the last step.",
    read.one(lambda view: view.snapshot.gradient_norm_peak),
)
GRADIENT_NORM_BASELINE = gauge(
    GLOBAL,
    "gradient_norm_baseline",
    "What this rank's gradient norm usually is: spikes count little, the first steps of a cascade not at all.",
    read.largest("gradient_norm_baseline"),
)
GRADIENT_SPIKE_RATIO = gauge(
    GLOBAL,
    "gradient_spike_ratio",
    "Gradient norm of this rank's last step over its baseline.",
    read.largest("gradient_spike_ratio"),
    stable=True,
)
GRADIENT_SPIKE_RATIO_PEAK = gauge(
    GLOBAL,
    "gradient_spike_ratio_peak",
    "Largest ratio of gradient norm to baseline on this rank in the 30 to 60 seconds up to the last step.",
    read.one(lambda view: view.snapshot.gradient_spike_ratio_peak),
    stable=True,
)
GRADIENT_MAX_ABS = gauge(
    GLOBAL,
    "gradient_max_abs",
    "Largest absolute element of this rank's gradient in the last step, before clipping.",
    read.largest("gradient_max_abs"),
)
ACTIVATION_MAX_ABS = gauge(
    GLOBAL,
    "activation_max_abs",
    "Largest absolute element of any layer's output on this rank, at the last step that measured it.",
    read.largest("activation_max_abs"),
)
MOMENTUM_MAX_ABS = gauge(
    GLOBAL,
    "momentum_max_abs",
    "Largest absolute element of the first moment on this rank (momentum_buffer, exp_avg), when last measured.",
    read.largest("momentum_max_abs"),
)
SECOND_MOMENT_MAX_ABS = gauge(
    GLOBAL,
    "second_moment_max_abs",
    "Largest element of the second moment on this rank (exp_avg_sq), when last measured.",
    read.largest("second_moment_max_abs"),
)
PARAMETER_NORM = gauge(
    GLOBAL,
    "parameter_norm",
    "L2 norm of this rank's parameters, or share of them, after the update, when last measured.",
    read.largest("parameter_norm"),
)
PARAMETER_MAX_ABS = gauge(
    GLOBAL,
    "parameter_max_abs",
    "Largest absolute parameter on this rank after the update, when last measured.",
    read.largest("parameter_max_abs"),
)
UPDATE_RATIO = gauge(
    GLOBAL,
    "update_ratio",
    "L2 norm of this rank's update over L2 norm of its parameters, when last measured.",
    read.largest("update_ratio"),
)
STEP_GRADIENT_NORM = MetricSpec(
    section=GLOBAL,
    path="step_gradient_norm",
    kind=Kind.HISTOGRAM,
    help="This rank's gradient norm of every step in which it was finite, in buckets of one decade.",
    read=read.nothing,
)
OVERFLOW_HEADROOM = gauge(
    GLOBAL,
    "overflow_headroom_decades",
    "Decades between the largest magnitude on this rank and the largest finite value of its dtype.",
    read.smallest("overflow_headroom_decades"),
)
STEPS_TO_OVERFLOW = gauge(
    GLOBAL,
    "steps_to_overflow",
    "Steps to overflow if growth keeps accelerating, while in state spike or cascade.",
    read.smallest("steps_to_overflow"),
)
ALIGNED_GRADIENT_NORM = gauge(
    GLOBAL,
    "aligned_gradient_norm",
    "Gradient norm of this rank at aligned_step, to be compared with other ranks or, where it is a share, added.",
    read.one(lambda view: view.snapshot.aligned_gradient_norm),
)
ALIGNED_STEP = gauge(
    GLOBAL,
    "aligned_step",
    "Last step of this rank that the setting aligned_every divides.",
    read.one(lambda view: view.snapshot.aligned_step),
)

# -- per layer ------------------------------------------------------------------------------------

LAYER_GRADIENT_NORM = _layer_gauge(
    "gradient_norm",
    "L2 norm of the layer's gradient on this rank, before clipping.",
    stable=True,
)
LAYER_GRADIENT_MAX_ABS = _layer_gauge(
    "gradient_max_abs",
    "Largest absolute element of the layer's gradient on this rank, before clipping.",
)
LAYER_GRADIENT_NONFINITE = _layer_counter(
    "gradient_nonfinite",
    "Non-finite elements of the layer's gradient on this rank since the process started, skipped updates included.",
)
LAYER_ACTIVATION_RMS = _layer_gauge(
    "activation_rms",
    "Root mean square of the layer's output on this rank, when last measured.",
)
LAYER_ACTIVATION_MAX_ABS = _layer_gauge(
    "activation_max_abs",
    "Largest absolute element of the layer's output on this rank, when last measured.",
)
LAYER_ACTIVATION_NONFINITE = _layer_counter(
    "activation_nonfinite",
    "Non-finite elements of the layer's output on this rank since the process started.",
)
LAYER_ACTIVATION_ZERO_RATIO = _layer_gauge(
    "activation_zero_ratio",
    "Share of the layer's output on this rank that is exactly zero, when last measured.",
)
LAYER_PARAMETER_NORM = _layer_gauge(
    "parameter_norm",
    "L2 norm of the layer's parameters on this rank after the update, when last measured.",
)
LAYER_UPDATE_RATIO = _layer_gauge(
    "update_ratio",
    "L2 norm of the layer's update over L2 norm of its parameters on this rank, when last measured.",
)
LAYER_MOMENTUM_MAX_ABS = _layer_gauge(
    "momentum_max_abs",
    "Largest absolute first moment of the layer's optimizer state on this rank, when last measured.",
)
LAYER_SECOND_MOMENT_MAX_ABS = _layer_gauge(
    "second_moment_max_abs",
    "Largest second moment of the layer's optimizer state on this rank, when last measured.",
)
LAYER_SPIKE_RATIO = _layer_gauge(
    "spike_ratio",
    "Gradient norm of the layer on this rank over its own baseline.",
    stable=True,
)

# -- judgement ------------------------------------------------------------------------------------

HEALTH_STATE = gauge(
    JUDGEMENT,
    "health_state",
    "Health of this rank after the last step: 0 warming up, 1 healthy, 2 spike, 3 cascade, 4 non-finite.",
    read.attempted(read.one(read.health)),
    "attempt",
    stable=True,
)
FINDINGS_TOTAL = counter(
    JUDGEMENT,
    "findings",
    "Steps with a finding of this kind on this rank since the process started.",
    read.attempted(read.words(FindingKind, lambda run, kind: run.findings.get(FindingKind(kind), 0))),
    "attempt",
    "finding",
    stable=True,
)
LAST_FINDING_TIMESTAMP = gauge(
    JUDGEMENT,
    "last_finding.timestamp",
    "Unix time of this rank's last finding of this kind; absent before the first.",
    read.attempted(read.words(FindingKind, read.last_finding("timestamp"))),
    "attempt",
    "finding",
    unit=Unit.SECONDS,
    stable=True,
)
LAST_FINDING_STEP = gauge(
    JUDGEMENT,
    "last_finding_step",
    "Step of this rank's last finding of this kind; absent before the first.",
    read.attempted(read.words(FindingKind, read.last_finding("step"))),
    "attempt",
    "finding",
    stable=True,
)
DIAGNOSIS = gauge(
    JUDGEMENT,
    "diagnosis",
    "1 for the failure shape that this rank diagnoses the run with, 0 for the others.",
    read.attempted(read.words(Shape, read.diagnosed)),
    "attempt",
    "shape",
    stable=True,
)
NONFINITE_STEPS_TOTAL = counter(
    JUDGEMENT,
    "nonfinite_steps",
    "Steps with a non-finite value of this quantity on this rank; gradients of skipped updates do not count.",
    read.attempted(
        read.words(NONFINITE_QUANTITIES, lambda run, quantity: run.nonfinite_steps.get(Quantity(quantity), 0))
    ),
    "attempt",
    "quantity",
    stable=True,
)
FIRST_NONFINITE_STEP = gauge(
    JUDGEMENT,
    "first_nonfinite_step",
    "Step of the first non-finite value on this rank; absent before it.",
    read.attempted(
        read.one(lambda view: None if (first := read.first_nonfinite(view.snapshot)) is None else first.step)
    ),
    "attempt",
    stable=True,
)
FIRST_NONFINITE_INFO = gauge(
    JUDGEMENT,
    "first_nonfinite_info",
    "1, with the layer and the quantity in which the first non-finite value on this rank appeared.",
    read.attempted(_first_place),
    "attempt",
    "layer",
    "quantity",
    stable=True,
)

# -- checkpoint -----------------------------------------------------------------------------------

LAST_CHECKPOINT_STEP = gauge(
    CHECKPOINT,
    "last_checkpoint_step",
    "Step of the last checkpoint that the run reported.",
    read.one(lambda view: view.snapshot.last_checkpoint_step),
    stable=True,
)
LAST_CHECKPOINT_TIMESTAMP = gauge(
    CHECKPOINT,
    "last_checkpoint.timestamp",
    "Unix time at which the last checkpoint was reported.",
    read.one(lambda view: view.snapshot.last_checkpoint_timestamp),
    unit=Unit.SECONDS,
)
LAST_CLEAN_CHECKPOINT_STEP = gauge(
    CHECKPOINT,
    "last_clean_checkpoint_step",
    "Step of the newest checkpoint that is no later than the last healthy step.",
    read.one(lambda view: view.snapshot.last_clean_checkpoint_step),
    stable=True,
)

# -- exporter -------------------------------------------------------------------------------------

OVERHEAD_SECONDS_TOTAL = counter(
    SELF,
    "overhead",
    "Seconds that gradexporter itself has run on all its threads.",
    read.one(lambda view: view.snapshot.itself.overhead_seconds),
    unit=Unit.SECONDS,
)
OVERHEAD_BUDGET_EXCEEDED = gauge(
    SELF,
    "overhead_budget_exceeded",
    "1 if sampled statistics cost more than their budget even when taken every tenth step.",
    read.one(lambda view: view.snapshot.itself.overhead_budget_exceeded),
)
CAPTURE_EVERY_STEPS = gauge(
    SELF,
    "capture_every_steps",
    "Steps between two readings of a sampled signal; 1 is every step.",
    lambda view: [((signal,), every) for signal, every in view.snapshot.itself.capture_every_steps.items()],
    "signal",
)
READBACK_LAG_STEPS = gauge(
    SELF,
    "readback_lag_steps",
    "Closed steps that are not judged yet.",
    read.one(lambda view: view.snapshot.itself.readback_lag_steps),
)
REPORTS_DROPPED_TOTAL = counter(
    SELF,
    "reports_dropped",
    "Steps that were dropped unjudged because the worker was behind.",
    read.one(lambda view: view.snapshot.itself.reports_dropped),
)
WATCHED_LAYERS = gauge(
    SELF, "watched_layers", "Layers that are watched.", read.one(lambda view: view.snapshot.itself.watched_layers)
)
SERIES = gauge(
    SELF,
    "series",
    "Series of this rank on all paths of the endpoint together, without those of process and Python.",
    read.nothing,
)
SERIES_DROPPED_TOTAL = counter(
    SELF,
    "series_dropped",
    "Series of layers and parameter groups that the series budget leaves out.",
    read.one(lambda view: view.series_dropped),
)
SIGNAL_AVAILABLE = gauge(
    SELF,
    "signal_available",
    "1 if the signal is collected, 0 if it cannot be.",
    lambda view: [((signal,), float(there)) for signal, there in view.snapshot.itself.signal_available.items()],
    "signal",
)
KERNELS_INFO = gauge(
    SELF,
    "kernels_info",
    "1, with what reduces this rank's tensors on each type of device: stock torch operations or native kernels.",
    lambda view: [(pair, 1.0) for pair in view.snapshot.itself.kernels.items()],
    "device",
    "backend",
)
FAILURES_TOTAL = counter(
    SELF,
    "failures",
    "Faults of gradexporter's own that were fenced off from training, by part.",
    lambda view: [((part,), count) for part, count in view.snapshot.itself.failures.items()],
    "part",
    stable=True,
)

CATALOG: tuple[MetricSpec, ...] = tuple(entry for entry in list(globals().values()) if isinstance(entry, MetricSpec))
"""Every family, in the order in which it is exposed."""


def label_names(spec: MetricSpec, view: View) -> tuple[str, ...]:
    """Names of the labels that ``spec`` has in this view; only run_info's depend on it."""
    return tuple(read.run_info_labels(view)) if spec is RUN_INFO else spec.labels
