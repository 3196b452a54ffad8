"""The catalogue as a text that other programs depend on, and what each reading means."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest

from gradexporter import metrics
from gradexporter.exposure import Exposure, View
from gradexporter.metrics import CATALOG, Kind, MetricSpec, Rows, Section, Unit
from gradexporter.records import (
    Diagnosis,
    FindingKind,
    FirstNonfinite,
    Identity,
    LayerStats,
    LayerTable,
    Quantity,
    SelfStats,
    Severity,
    Shape,
    Snapshot,
    State,
    StepReport,
)
from gradexporter.tally import Tally

TARGET_LABELS = {"job", "instance", "namespace", "pod", "container", "cluster", "zone", "type", "le"}
"""Labels that belong to Prometheus and to the platform; ours would be renamed to exported_something."""

LABEL_IN_NAME = {
    "run_phase": "phase",
    "last_finding.timestamp": "finding",
    "last_finding_step": "finding",
    "signal_available": "signal",
}
"""Families whose name has to say the word that their label says."""

every_family = pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.path)


@every_family
def test_help_is_one_sentence(spec: MetricSpec) -> None:
    assert re.fullmatch(r"[A-Z0-9].*[^.]\.", spec.help)
    assert not re.search(r"[.!?] [A-Z]", spec.help)
    assert "\n" not in spec.help


@every_family
def test_a_name_is_plain_and_says_its_kind(spec: MetricSpec) -> None:
    assert re.fullmatch(r"gradexporter_[a-z][a-z0-9_]*", spec.name)
    assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total")
    assert not re.search(r"_(count|sum|bucket|created)$", spec.name)


@every_family
def test_a_unit_is_a_base_unit_and_ends_the_name(spec: MetricSpec) -> None:
    assert not re.search(r"_(ms|milliseconds|minutes|hours|mib|gib|kb|mb|percent|pct|mhz|celsius_c)(_|$)", spec.name)
    suffix = spec.unit.value[0]
    assert spec.base_name.endswith(f"_{suffix}") if suffix else "seconds" not in spec.name
    assert spec.name.count(suffix or "gradexporter") == 1


@every_family
def test_labels_are_ours_and_not_said_by_the_name(spec: MetricSpec) -> None:
    assert not TARGET_LABELS & set(spec.labels)
    assert not set(metrics.IDENTITY_LABELS) & set(spec.labels), "the sinks add identity"
    assert len(set(spec.labels)) == len(spec.labels)
    for label in spec.labels:
        said = label in re.split(r"[._]", spec.path) and not (label == "layer" and spec.section is Section.LAYER)
        assert not said or LABEL_IN_NAME.get(spec.path) == label


@every_family
def test_only_layer_families_have_a_layer_of_their_own(spec: MetricSpec) -> None:
    assert (spec.section is Section.LAYER) == spec.path.startswith("layer_") == (spec.labels == ("layer",))


@every_family
def test_judgement_carries_the_attempt_so_that_a_restart_is_a_new_incident(spec: MetricSpec) -> None:
    assert (spec.section is Section.JUDGEMENT) == (spec.labels[:1] == ("attempt",) and spec is not metrics.RUN_INFO)


def test_names_and_paths_are_unique() -> None:
    for name in ("path", "name", "base_name", "otlp_name"):
        values = [getattr(spec, name) for spec in CATALOG]
        assert len(set(values)) == len(values), name


def test_the_catalogue_is_what_was_released(golden: Callable[[str, str], None]) -> None:
    """A renamed or removed series breaks dashboards, rules and other people's queries: say so in the changelog."""
    entries = [
        {
            "path": spec.path,
            "name": spec.name,
            "kind": spec.kind.value,
            "unit": spec.unit.value[0],
            "labels": list(spec.labels),
        }
        for spec in CATALOG
    ]
    golden("catalog.json", json.dumps(entries, indent=2) + "\n")


def test_a_unit_that_ends_the_path_is_not_said_twice() -> None:
    spec = MetricSpec(path="a.seconds", section=Section.RUN, kind=Kind.COUNTER, help="", read=tuple, unit=Unit.SECONDS)
    assert spec.name == "gradexporter_a_seconds_total"
    assert spec.otlp_name == "gradexporter.a.seconds"


# -- readings -----------------------------------------------------------------------------------------


def fresh() -> Snapshot:
    return Tally(Identity(run_id="r", attempt="2"), clock=lambda: 100.0).snapshot


def after(*reports: StepReport) -> Snapshot:
    tally = Tally(Identity(run_id="r", attempt="2"), clock=lambda: 100.0)
    for report in reports:
        tally.add(report, SelfStats())
    return tally.snapshot


def view_of(snapshot: Snapshot) -> View:
    return Exposure(2000).view(snapshot)


def readings(spec: MetricSpec, snapshot: Snapshot) -> dict[tuple[str, ...], float]:
    return dict(spec.read(view_of(snapshot)))


EVENT_COUNTERS = {
    metrics.STEPS_TOTAL: [("applied",), ("skipped",)],
    metrics.CLIPPED_STEPS_TOTAL: [()],
    metrics.FINDINGS_TOTAL: [("2", str(kind)) for kind in FindingKind],
    metrics.NONFINITE_STEPS_TOTAL: [
        ("2", word) for word in ("input", "activation", "loss", "gradient", "parameter", "optimizer_state")
    ],
    metrics.REPORTS_DROPPED_TOTAL: [()],
    metrics.SERIES_DROPPED_TOTAL: [()],
}


@pytest.mark.parametrize("spec", EVENT_COUNTERS, ids=lambda spec: spec.path)
def test_an_event_counter_is_there_at_0_before_the_first_step(spec: MetricSpec) -> None:
    """A counter that appears with its first event has no increase that a rule could see."""
    assert readings(spec, fresh()) == dict.fromkeys(EVENT_COUNTERS[spec], 0.0)


ABSENT_AT_FIRST = [
    metrics.STEP,
    metrics.LAST_STEP_TIMESTAMP,
    metrics.LAST_HEALTHY_STEP,
    metrics.LOSS_VALUE,
    metrics.LEARNING_RATE,
    metrics.GRADIENT_NORM,
    metrics.GRADIENT_NORM_PEAK,
    metrics.GRADIENT_SPIKE_RATIO,
    metrics.LAYER_GRADIENT_NORM,
    metrics.LAYER_GRADIENT_NONFINITE,
    metrics.LAST_FINDING_STEP,
    metrics.LAST_FINDING_TIMESTAMP,
    metrics.FIRST_NONFINITE_STEP,
    metrics.FIRST_NONFINITE_INFO,
    metrics.LAST_CHECKPOINT_STEP,
    metrics.LAST_CLEAN_CHECKPOINT_STEP,
]


@pytest.mark.parametrize("spec", ABSENT_AT_FIRST, ids=lambda spec: spec.path)
def test_what_has_not_been_measured_is_absent(spec: MetricSpec) -> None:
    assert readings(spec, fresh()) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("field", ["loss", "gradient_norm", "activation_max_abs", "parameter_norm", "update_ratio"])
def test_a_reading_that_is_not_finite_is_published_as_it_is(field: str, value: float) -> None:
    spec = next(spec for spec in CATALOG if spec.path == field)

    (published,) = readings(spec, after(StepReport(step=1, **{field: value}))).values()

    assert math.isnan(published) if math.isnan(value) else published == value


def test_a_layer_shows_nan_where_it_was_read_and_nothing_where_it_was_not() -> None:
    rows = [
        LayerStats(layer="a", gradient_norm=math.nan),
        LayerStats(layer="b"),
        LayerStats(layer="c", gradient_norm=2),
    ]
    snapshot = after(StepReport(step=1, layers=LayerTable.from_rows(rows)))

    shown = readings(metrics.LAYER_GRADIENT_NORM, snapshot)

    assert shown.keys() == {("a",), ("c",)}
    assert math.isnan(shown["a",])
    assert readings(metrics.LAYER_ACTIVATION_RMS, snapshot) == {}


def test_a_run_without_a_step_warms_up_and_one_that_nobody_judges_has_no_health() -> None:
    assert readings(metrics.HEALTH_STATE, fresh()) == {("2",): 0.0}
    assert readings(metrics.HEALTH_STATE, after(StepReport(step=1))) == {}


def test_several_optimizers_carry_the_worst() -> None:
    snapshot = after(
        StepReport(step=1, gradient_norm=5.0, state=State.HEALTHY, last_healthy_step=7, clip_factor=0.5),
        StepReport(step=2, gradient_norm=2.0, state=State.SPIKE, last_healthy_step=4, clip_factor=1.0, optimizer=1),
    )

    assert readings(metrics.GRADIENT_NORM, snapshot) == {(): 5.0}
    assert readings(metrics.HEALTH_STATE, snapshot) == {("2",): 2.0}
    assert readings(metrics.LAST_HEALTHY_STEP, snapshot) == {(): 4.0}
    assert readings(metrics.CLIP_FACTOR, snapshot) == {(): 0.5}
    assert readings(metrics.STEP, snapshot) == {(): 2.0}


def test_nan_of_one_optimizer_is_not_hidden_by_another() -> None:
    snapshot = after(
        StepReport(step=1, gradient_norm=math.nan, clip_factor=math.nan),
        StepReport(step=1, gradient_norm=2.0, clip_factor=0.5, optimizer=1),
    )

    assert math.isnan(readings(metrics.GRADIENT_NORM, snapshot)[()])
    assert math.isnan(readings(metrics.CLIP_FACTOR, snapshot)[()])


def test_learning_rates_are_told_apart_by_optimizer_and_group() -> None:
    snapshot = after(
        StepReport(step=1, group_learning_rates=(0.1, 0.2)),
        StepReport(step=1, learning_rate=0.3, optimizer=1),
    )

    assert readings(metrics.LEARNING_RATE, snapshot) == {("0",): 0.1, ("1",): 0.2, ("1.0",): 0.3}


def test_a_verdict_names_shape_layer_and_quantity() -> None:
    snapshot = after(
        StepReport(
            step=9,
            first_nonfinite=FirstNonfinite(step=8, layer="6", quantity=Quantity.ACTIVATION),
            diagnosis=Diagnosis(shape=Shape.SPIKE_CASCADE, severity=Severity.CRITICAL, since_step=5),
        )
    )

    shown = readings(metrics.DIAGNOSIS, snapshot)
    assert shown.pop(("2", "spike_cascade")) == 1.0
    assert shown == {("2", str(shape)): 0.0 for shape in Shape if shape is not Shape.SPIKE_CASCADE}
    assert readings(metrics.FIRST_NONFINITE_STEP, snapshot) == {("2",): 8.0}
    assert readings(metrics.FIRST_NONFINITE_INFO, snapshot) == {("2", "6", "activation"): 1.0}


def test_run_info_carries_who_the_run_is_and_what_the_user_added() -> None:
    identity = Identity(run_id="r", world_size=8, local_rank=3, paging=False, model="Net", labels={"team": "vision"})
    view = view_of(Snapshot(identity=identity))

    ((values, one),) = metrics.RUN_INFO.read(view)

    assert one == 1.0
    assert dict(zip(metrics.label_names(metrics.RUN_INFO, view), values, strict=True)) == {
        "attempt": "0",
        "local_rank": "3",
        "world_size": "8",
        "model": "Net",
        "norms": "global",
        "optimizer": "",
        "paging": "off",
        "team": "vision",
    }


def test_phase_and_end_are_one_of_a_closed_set() -> None:
    tally = Tally(Identity(run_id="r"), clock=lambda: 100.0)
    tally.phase("eval")
    ended = tally.end("exception", SelfStats())

    assert readings(metrics.RUN_PHASE, ended) == {("train",): 0.0, ("eval",): 1.0, ("checkpoint",): 0.0}
    assert readings(metrics.RUN_ENDED, ended) == {
        ("closed",): 0.0,
        ("exception",): 1.0,
        ("signal",): 0.0,
    }


def test_what_the_exporter_knows_of_itself_is_shown() -> None:
    itself = SelfStats(
        overhead_seconds=1.5,
        capture_every_steps={"activation": 5},
        signal_available={"pre_clip": False},
        failures={"judge": 2},
    )
    snapshot = Tally(Identity(run_id="r"), clock=lambda: 100.0).refresh(itself)

    assert readings(metrics.OVERHEAD_SECONDS_TOTAL, snapshot) == {(): 1.5}
    assert readings(metrics.CAPTURE_EVERY_STEPS, snapshot) == {("activation",): 5.0}
    assert readings(metrics.SIGNAL_AVAILABLE, snapshot) == {("pre_clip",): 0.0}
    assert readings(metrics.FAILURES_TOTAL, snapshot) == {("judge",): 2.0}


def test_rows_are_samples_in_columns() -> None:
    rows = Rows.of(iter([(("a",), 1), (("b",), 2)]))

    assert (rows.labels, rows.readings) == ((("a",), ("b",)), [1.0, 2.0])
    assert list(rows) == [(("a",), 1.0), (("b",), 2.0)]
    assert Rows.of(rows) is rows
    assert len(Rows()) == 0
