"""The catalogue: every series once, with its name, unit, help and how it is read.

Exposition, OTLP names, dashboards, rules and the README table derive from ``CATALOG``; outside this
module no string starts with the prefix of a series.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from gradexporter import __version__
from gradexporter.exposure import View
from gradexporter.records import (
    NONFINITE_QUANTITIES,
    FindingKind,
    FirstNonfinite,
    Quantity,
    Shape,
    Snapshot,
    StepReport,
)

PREFIX = "gradexporter"

IDENTITY_LABELS = ("run_id", "rank")
"""On every series; the collector puts them there, entries below leave them out."""

Sample = tuple[tuple[str, ...], float]
"""Label values in the order of ``MetricSpec.labels``, and the reading."""


class Kind(Enum):
    """What a Prometheus server may assume about a family."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Unit(Enum):
    """Base unit: Prometheus suffix and UCUM code. A norm has none."""

    NONE = ("", "")
    SECONDS = ("seconds", "s")
    BYTES = ("bytes", "By")


class Section(str, Enum):
    """Where the README table and the dashboards put a family."""

    RUN = "run"
    LOSS = "loss, rate, scale"
    GLOBAL = "global magnitudes"
    LAYER = "per layer"
    JUDGEMENT = "judgement"
    CHECKPOINT = "checkpoint"
    SELF = "exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric family and how it is read off a view of the published snapshot.

    ``read`` yields nothing where the value is absent, and NaN where NaN was measured. A histogram is
    read off ``Snapshot.gradient_norms`` by the sinks, so its ``read`` yields nothing.
    """

    path: str
    section: Section
    kind: Kind
    help: str
    """One sentence; says whether the value is this rank's share or global where that differs."""
    read: Callable[[View], Iterable[Sample]]
    unit: Unit = Unit.NONE
    labels: tuple[str, ...] = ()
    stable: bool = False
    """A stable name changes only with a major version; the others may, with a note."""

    @property
    def name(self) -> str:
        """Prometheus name: prefix, path, unit, and ``_total`` for a counter."""
        parts = [PREFIX, self.path.replace(".", "_").removesuffix("_" + self.unit.value[0]), self.unit.value[0]]
        if self.kind is Kind.COUNTER:
            parts.append("total")
        return "_".join(part for part in parts if part)

    @property
    def otlp_name(self) -> str:
        """OpenTelemetry name; the unit travels apart."""
        return f"{PREFIX}.{self.path}"


Scalar = Callable[[View], "float | None"]


def _one(read: Scalar) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        value = read(view)
        if value is not None:
            yield (), float(value)

    return samples


def worst(values: Iterable[float | None]) -> float | None:
    """The largest of the present values, NaN if one of them is NaN, None if none is present."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return math.nan if any(math.isnan(value) for value in present) else max(present)


def _field(name: str) -> Callable[[View], Iterator[Sample]]:
    """Run-level value of a report field; of several optimizers the worst."""
    return _one(lambda view: worst(getattr(report, name) for report in view.snapshot.reports))


def _lowest(name: str) -> Callable[[View], Iterator[Sample]]:
    def lowest(view: View) -> float | None:
        present = [getattr(report, name) for report in view.snapshot.reports]
        return min((value for value in present if value is not None), default=None)

    return _one(lowest)


def _latest(read: Callable[[StepReport], float | None]) -> Callable[[View], Iterator[Sample]]:
    return _one(lambda view: None if view.snapshot.report is None else read(view.snapshot.report))


def _layer(column: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        pair = view.layers.column(column)
        if pair is not None:
            for name, value, observed in zip(view.layers.names, pair[0].tolist(), pair[1].tolist(), strict=True):
                if observed:
                    yield (name,), value

    return samples


def _attempted(read: Callable[[View], Iterable[Sample]]) -> Callable[[View], Iterator[Sample]]:
    """Puts the attempt in front: judgement series carry it, so that a restart opens a new incident."""

    def samples(view: View) -> Iterator[Sample]:
        attempt = view.snapshot.identity.attempt
        for labels, value in read(view):
            yield (attempt, *labels), value

    return samples


def _words(words: Iterable[str], value: Callable[[Snapshot, str], float | None]) -> Callable[[View], Iterator[Sample]]:
    listed = tuple(words)

    def samples(view: View) -> Iterator[Sample]:
        for word in listed:
            reading = value(view.snapshot, word)
            if reading is not None:
                yield (str(word),), float(reading)

    return samples


def _gauge(
    section: Section,
    path: str,
    help: str,
    read: Callable[[View], Iterable[Sample]],
    *labels: str,
    unit: Unit = Unit.NONE,
) -> MetricSpec:
    return MetricSpec(section=section, path=path, kind=Kind.GAUGE, help=help, read=read, labels=labels, unit=unit)


def _counter(
    section: Section,
    path: str,
    help: str,
    read: Callable[[View], Iterable[Sample]],
    *labels: str,
    unit: Unit = Unit.NONE,
) -> MetricSpec:
    return MetricSpec(section=section, path=path, kind=Kind.COUNTER, help=help, read=read, labels=labels, unit=unit)


def run_info_labels(view: View) -> dict[str, str]:
    """Labels of run_info: who the run is, and the user's routing labels."""
    identity = view.snapshot.identity
    return {
        "attempt": identity.attempt,
        "local_rank": str(identity.local_rank),
        "world_size": str(identity.world_size),
        "model": identity.model,
        "optimizer": identity.optimizer,
        "paging": "on" if identity.paging else "off",
        **identity.labels,
    }


def label_names(spec: MetricSpec, view: View) -> tuple[str, ...]:
    """Names of the labels that ``spec`` has in this view; only run_info's depend on it."""
    return tuple(run_info_labels(view)) if spec is RUN_INFO else spec.labels


RUN, LOSS, GLOBAL, LAYER = Section.RUN, Section.LOSS, Section.GLOBAL, Section.LAYER
JUDGEMENT, CHECKPOINT, SELF = Section.JUDGEMENT, Section.CHECKPOINT, Section.SELF


def _last_finding(run: Snapshot, kind: str, what: str) -> float | None:
    last = run.last_findings.get(FindingKind(kind))
    return None if last is None else float(getattr(last, what))


def _diagnosed(run: Snapshot, shape: str) -> bool:
    return any(report.diagnosis is not None and report.diagnosis.shape == shape for report in run.reports)


def _first(run: Snapshot) -> FirstNonfinite | None:
    places = [report.first_nonfinite for report in run.reports if report.first_nonfinite is not None]
    return min(places, key=lambda place: place.step, default=None)


def _first_place(run: Snapshot) -> list[Sample]:
    first = _first(run)
    return [] if first is None else [((first.layer, str(first.quantity)), 1.0)]


# -- run ------------------------------------------------------------------------------------------

BUILD_INFO = _gauge(
    RUN,
    "build_info",
    "1, with the versions of gradexporter and Python.",
    lambda view: [((__version__, platform.python_version()), 1.0)],
    "version",
    "python",
)
RUN_INFO = MetricSpec(
    section=RUN,
    path="run_info",
    kind=Kind.GAUGE,
    help="1, with what identifies the run; routing labels set by the user appear here too.",
    read=lambda view: [(tuple(run_info_labels(view).values()), 1.0)],
    labels=("attempt", "local_rank", "world_size", "model", "optimizer", "paging"),
)
RUN_PHASE = _gauge(
    RUN,
    "run_phase",
    "1 for the phase that the run is in, 0 for the others.",
    _words(("train", "eval", "checkpoint"), lambda run, phase: float(run.phase == phase)),
    "phase",
)
RUN_ENDED = _gauge(
    RUN,
    "run_ended",
    "1 for the way in which the run ended, 0 while it goes on.",
    _words(("closed", "exception", "signal", "killed"), lambda run, reason: float(run.ended == reason)),
    "reason",
)
STEP = _gauge(
    RUN, "step", "Number of the last optimizer update, applied or skipped.", _latest(lambda report: report.step)
)
STEPS_TOTAL = _counter(
    RUN,
    "steps",
    "Optimizer updates since the process started, by whether a loss scaler skipped them.",
    lambda view: [(("applied",), view.snapshot.steps_applied), (("skipped",), view.snapshot.steps_skipped)],
    "outcome",
)
STEP_SECONDS_TOTAL = _counter(
    RUN,
    "step.seconds",
    "Seconds spent in steps; its rate over the rate of steps is the step time.",
    _one(lambda view: view.snapshot.step_seconds),
    unit=Unit.SECONDS,
)
LAST_STEP_TIMESTAMP = _gauge(
    RUN,
    "last_step.timestamp",
    "Unix time at which the last step closed.",
    _latest(lambda report: report.timestamp),
    unit=Unit.SECONDS,
)
LAST_HEALTHY_STEP = _gauge(
    RUN,
    "last_healthy_step",
    "Last step in state healthy; a checkpoint up to it is worth restarting from.",
    _lowest("last_healthy_step"),
)

# -- loss, rate, scale ----------------------------------------------------------------------------

LOSS_VALUE = _gauge(
    LOSS, "loss", "Mean loss of the last step on this rank, NaN if one of its parts was.", _field("loss")
)
LEARNING_RATE = _gauge(
    LOSS,
    "learning_rate",
    "Learning rate of each parameter group in the last step.",
    lambda view: [
        ((str(index),), rate)
        for index, rate in enumerate(rate for report in view.snapshot.reports for rate in report.group_learning_rates)
    ],
    "group",
)
LOSS_SCALE = _gauge(LOSS, "loss_scale", "Scale that a gradient scaler multiplied the loss with.", _field("loss_scale"))
CLIP_FACTOR = _gauge(
    LOSS,
    "clip_factor",
    "What clipping multiplied the gradient of the last step with, 1 if it left it alone.",
    _lowest("clip_factor"),
)
CLIPPED_STEPS_TOTAL = _counter(
    LOSS, "clipped_steps", "Steps whose gradient clipping made smaller.", _one(lambda view: view.snapshot.clipped_steps)
)

# -- global magnitudes ----------------------------------------------------------------------------

GRADIENT_NORM = _gauge(
    GLOBAL,
    "gradient_norm",
    "L2 norm of this rank's gradient in the last step, before clipping, loss scale divided out.",
    _field("gradient_norm"),
)
GRADIENT_NORM_PEAK = _gauge(
    GLOBAL,
    "gradient_norm_peak",
    "Largest gradient norm of the last 30 to 60 seconds.",
    _one(lambda view: view.snapshot.gradient_norm_peak),
)
GRADIENT_NORM_BASELINE = _gauge(
    GLOBAL,
    "gradient_norm_baseline",
    "What the gradient norm usually is, learnt from healthy steps.",
    _field("gradient_norm_baseline"),
)
GRADIENT_SPIKE_RATIO = _gauge(
    GLOBAL, "gradient_spike_ratio", "Gradient norm of the last step over its baseline.", _field("gradient_spike_ratio")
)
GRADIENT_SPIKE_RATIO_PEAK = _gauge(
    GLOBAL,
    "gradient_spike_ratio_peak",
    "Largest ratio of gradient norm to baseline of the last 30 to 60 seconds.",
    _one(lambda view: view.snapshot.gradient_spike_ratio_peak),
)
GRADIENT_MAX_ABS = _gauge(
    GLOBAL,
    "gradient_max_abs",
    "Largest absolute gradient element of the last step, before clipping.",
    _field("gradient_max_abs"),
)
ACTIVATION_MAX_ABS = _gauge(
    GLOBAL,
    "activation_max_abs",
    "Largest absolute element of any layer's output, at the last step that measured it.",
    _field("activation_max_abs"),
)
MOMENTUM_MAX_ABS = _gauge(
    GLOBAL,
    "momentum_max_abs",
    "Largest absolute element of the optimizer's first moment (momentum_buffer, exp_avg).",
    _field("momentum_max_abs"),
)
SECOND_MOMENT_MAX_ABS = _gauge(
    GLOBAL,
    "second_moment_max_abs",
    "Largest element of the optimizer's second moment (exp_avg_sq).",
    _field("second_moment_max_abs"),
)
PARAMETER_NORM = _gauge(
    GLOBAL, "parameter_norm", "L2 norm of this rank's parameters after the update.", _field("parameter_norm")
)
PARAMETER_MAX_ABS = _gauge(
    GLOBAL, "parameter_max_abs", "Largest absolute parameter after the update.", _field("parameter_max_abs")
)
UPDATE_RATIO = _gauge(
    GLOBAL, "update_ratio", "L2 norm of the update over L2 norm of the parameters.", _field("update_ratio")
)
STEP_GRADIENT_NORM = MetricSpec(
    section=GLOBAL,
    path="step_gradient_norm",
    kind=Kind.HISTOGRAM,
    help="Gradient norm of every step with a finite one, in buckets of one decade.",
    read=lambda view: (),
)
OVERFLOW_HEADROOM = _gauge(
    GLOBAL,
    "overflow_headroom_decades",
    "Decades between the largest magnitude and the largest value of its dtype.",
    _lowest("overflow_headroom_decades"),
)
STEPS_TO_OVERFLOW = _gauge(
    GLOBAL,
    "steps_to_overflow",
    "Steps to overflow if growth keeps accelerating, while in state spike or cascade.",
    _lowest("steps_to_overflow"),
)

# -- per layer ------------------------------------------------------------------------------------

LAYER_GRADIENT_NORM = _gauge(
    LAYER,
    "layer_gradient_norm",
    "L2 norm of the layer's gradient on this rank, before clipping.",
    _layer("gradient_norm"),
    "layer",
)
LAYER_GRADIENT_MAX_ABS = _gauge(
    LAYER,
    "layer_gradient_max_abs",
    "Largest absolute gradient element of the layer, before clipping.",
    _layer("gradient_max_abs"),
    "layer",
)
LAYER_GRADIENT_NONFINITE = _counter(
    LAYER,
    "layer_gradient_nonfinite",
    "Non-finite gradient elements of the layer, skipped updates included.",
    lambda view: [((name,), total) for name, total in view.layer_gradient_nonfinite.items()],
    "layer",
)
LAYER_ACTIVATION_RMS = _gauge(
    LAYER,
    "layer_activation_rms",
    "Root mean square of the layer's output, at the last step that measured it.",
    _layer("activation_rms"),
    "layer",
)
LAYER_ACTIVATION_MAX_ABS = _gauge(
    LAYER,
    "layer_activation_max_abs",
    "Largest absolute element of the layer's output, at the last step that measured it.",
    _layer("activation_max_abs"),
    "layer",
)
LAYER_ACTIVATION_NONFINITE = _counter(
    LAYER,
    "layer_activation_nonfinite",
    "Non-finite elements of the layer's output.",
    lambda view: [((name,), total) for name, total in view.layer_activation_nonfinite.items()],
    "layer",
)
LAYER_ACTIVATION_ZERO_RATIO = _gauge(
    LAYER,
    "layer_activation_zero_ratio",
    "Share of the layer's output that is exactly zero, at the last step that measured it.",
    _layer("activation_zero_ratio"),
    "layer",
)
LAYER_PARAMETER_NORM = _gauge(
    LAYER,
    "layer_parameter_norm",
    "L2 norm of the layer's parameters on this rank, after the update.",
    _layer("parameter_norm"),
    "layer",
)
LAYER_UPDATE_RATIO = _gauge(
    LAYER,
    "layer_update_ratio",
    "L2 norm of the layer's update over L2 norm of its parameters.",
    _layer("update_ratio"),
    "layer",
)
LAYER_MOMENTUM_MAX_ABS = _gauge(
    LAYER,
    "layer_momentum_max_abs",
    "Largest absolute first moment of the layer's optimizer state.",
    _layer("momentum_max_abs"),
    "layer",
)
LAYER_SECOND_MOMENT_MAX_ABS = _gauge(
    LAYER,
    "layer_second_moment_max_abs",
    "Largest second moment of the layer's optimizer state.",
    _layer("second_moment_max_abs"),
    "layer",
)
LAYER_SPIKE_RATIO = _gauge(
    LAYER, "layer_spike_ratio", "Gradient norm of the layer over its own baseline.", _layer("spike_ratio"), "layer"
)

# -- judgement ------------------------------------------------------------------------------------

HEALTH_STATE = _gauge(
    JUDGEMENT,
    "health_state",
    "0 warming up, 1 healthy, 2 spike, 3 cascade, 4 non-finite.",
    _attempted(_one(lambda view: None if view.snapshot.state is None else view.snapshot.state.code)),
    "attempt",
)
FINDINGS_TOTAL = _counter(
    JUDGEMENT,
    "findings",
    "Steps with a finding of this kind.",
    _attempted(_words(FindingKind, lambda run, kind: run.findings.get(FindingKind(kind), 0))),
    "attempt",
    "finding",
)
LAST_FINDING_TIMESTAMP = _gauge(
    JUDGEMENT,
    "last_finding.timestamp",
    "Unix time of the last finding of this kind; absent before the first.",
    _attempted(_words(FindingKind, lambda run, kind: _last_finding(run, kind, "timestamp"))),
    "attempt",
    "finding",
    unit=Unit.SECONDS,
)
LAST_FINDING_STEP = _gauge(
    JUDGEMENT,
    "last_finding_step",
    "Step of the last finding of this kind; absent before the first.",
    _attempted(_words(FindingKind, lambda run, kind: _last_finding(run, kind, "step"))),
    "attempt",
    "finding",
)
DIAGNOSIS = _gauge(
    JUDGEMENT,
    "diagnosis",
    "1 for the failure shape that the run is diagnosed with, 0 for the others.",
    _attempted(_words(Shape, lambda run, shape: float(_diagnosed(run, shape)))),
    "attempt",
    "shape",
)
NONFINITE_STEPS_TOTAL = _counter(
    JUDGEMENT,
    "nonfinite_steps",
    "Steps with a non-finite value in this quantity; gradients of skipped updates do not count.",
    _attempted(_words(NONFINITE_QUANTITIES, lambda run, quantity: run.nonfinite_steps.get(Quantity(quantity), 0))),
    "attempt",
    "quantity",
)
FIRST_NONFINITE_STEP = _gauge(
    JUDGEMENT,
    "first_nonfinite_step",
    "Step of the run's first non-finite value; absent before it.",
    _attempted(_one(lambda view: None if (first := _first(view.snapshot)) is None else first.step)),
    "attempt",
)
FIRST_NONFINITE_INFO = _gauge(
    JUDGEMENT,
    "first_nonfinite_info",
    "1, with the layer and the quantity in which the first non-finite value appeared.",
    _attempted(lambda view: _first_place(view.snapshot)),
    "attempt",
    "layer",
    "quantity",
)

# -- checkpoint -----------------------------------------------------------------------------------

LAST_CHECKPOINT_STEP = _gauge(
    CHECKPOINT,
    "last_checkpoint_step",
    "Step of the last checkpoint that the run reported.",
    _one(lambda view: view.snapshot.last_checkpoint_step),
)
LAST_CHECKPOINT_TIMESTAMP = _gauge(
    CHECKPOINT,
    "last_checkpoint.timestamp",
    "Unix time at which the last checkpoint was reported.",
    _one(lambda view: view.snapshot.last_checkpoint_timestamp),
    unit=Unit.SECONDS,
)
LAST_CLEAN_CHECKPOINT_STEP = _gauge(
    CHECKPOINT,
    "last_clean_checkpoint_step",
    "Step of the newest checkpoint that is no later than the last healthy step.",
    _one(lambda view: view.snapshot.last_clean_checkpoint_step),
)

# -- exporter -------------------------------------------------------------------------------------

OVERHEAD_SECONDS_TOTAL = _counter(
    SELF,
    "overhead",
    "Seconds that gradexporter itself has run, over all its threads.",
    _one(lambda view: view.snapshot.itself.overhead_seconds),
    unit=Unit.SECONDS,
)
OVERHEAD_BUDGET_EXCEEDED = _gauge(
    SELF,
    "overhead_budget_exceeded",
    "1 if sampled statistics cost more than their budget at the slowest cadence.",
    _one(lambda view: view.snapshot.itself.overhead_budget_exceeded),
)
CAPTURE_EVERY_STEPS = _gauge(
    SELF,
    "capture_every_steps",
    "Steps between two readings of a sampled signal; 1 is every step.",
    lambda view: [((signal,), every) for signal, every in view.snapshot.itself.capture_every_steps.items()],
    "signal",
)
READBACK_LAG_STEPS = _gauge(
    SELF,
    "readback_lag_steps",
    "Closed steps that are not judged yet.",
    _one(lambda view: view.snapshot.itself.readback_lag_steps),
)
REPORTS_DROPPED_TOTAL = _counter(
    SELF,
    "reports_dropped",
    "Steps that were dropped unjudged because the worker was behind.",
    _one(lambda view: view.snapshot.itself.reports_dropped),
)
WATCHED_LAYERS = _gauge(
    SELF, "watched_layers", "Layers that are watched.", _one(lambda view: view.snapshot.itself.watched_layers)
)
SERIES = _gauge(
    SELF,
    "series",
    "Series of this rank that the endpoint exposes, over all its paths.",
    lambda view: (),
)
SERIES_DROPPED_TOTAL = _counter(
    SELF,
    "series_dropped",
    "Layer series left out of the exposition by the series budget, each counted once.",
    _one(lambda view: view.series_dropped),
)
SIGNAL_AVAILABLE = _gauge(
    SELF,
    "signal_available",
    "1 if the signal is collected, 0 if it cannot be.",
    lambda view: [((signal,), float(there)) for signal, there in view.snapshot.itself.signal_available.items()],
    "signal",
)
FAILURES_TOTAL = _counter(
    SELF,
    "failures",
    "Faults of gradexporter's own that were fenced off from training, by part.",
    lambda view: [((part,), count) for part, count in view.snapshot.itself.failures.items()],
    "part",
)

CATALOG: tuple[MetricSpec, ...] = tuple(entry for entry in list(globals().values()) if isinstance(entry, MetricSpec))
"""Every family, in the order in which it is exposed."""
