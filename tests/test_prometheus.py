"""What a Prometheus server reads: the collector, the two text formats, the golden scrape."""

from __future__ import annotations

import dataclasses
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from fakes import Failures
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gradexporter import __version__
from gradexporter.metrics import CATALOG, Section
from gradexporter.records import (
    Diagnosis,
    Finding,
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
from gradexporter.sinks.prometheus import PrometheusCollector
from gradexporter.sinks.prometheus.collector import Source, bound_text
from gradexporter.sinks.prometheus.http import Request, gzipped
from gradexporter.sinks.prometheus.pages import METRICS_PATHS, Pages
from gradexporter.sinks.prometheus.render import Format, Renderer, number_text
from gradexporter.tally import Tally

AWKWARD = 'quote " backslash \\ newline \n umlaut \u00e4'


def quiet() -> Snapshot:
    """Before the first step."""
    return Tally(Identity(run_id="run-1"), clock=lambda: 1_700_000_000.0).snapshot


def story() -> Snapshot:
    """Three steps: healthy, a spike, a loss that is lost."""
    tally = Tally(
        Identity(
            run_id="run-1",
            rank=0,
            world_size=4,
            attempt="1",
            model="Net",
            optimizer="SGD",
            labels={"team": AWKWARD},
        ),
        clock=lambda: 1_700_000_000.0,
    )
    itself = SelfStats(
        overhead_seconds=0.125,
        capture_every_steps={"activation": 1, "state": 10},
        watched_layers=2,
        signal_available={"pre_clip": True},
        failures={"judge": 0},
    )
    tally.checkpoint(1)
    for step, norm, loss in ((1, 2.5, 0.7), (2, 1_234_567.0, 0.8), (3, math.inf, math.nan)):
        layers = [
            LayerStats(layer="encoder.0", gradient_norm=norm / 2, gradient_nonfinite=0.0, activation_rms=0.5),
            LayerStats(
                layer=AWKWARD, gradient_norm=math.nan if step == 3 else norm, gradient_nonfinite=step // 3 * 2.0
            ),
        ]
        odd = Finding(
            kind=FindingKind.NONFINITE if step == 3 else FindingKind.GRADIENT_SPIKE,
            severity=Severity.CRITICAL,
            step=step,
            quantity=Quantity.GRADIENT,
        )
        tally.add(
            StepReport(
                step=step,
                loss=loss,
                gradient_norm=norm,
                gradient_spike_ratio=norm / 2.5 if step < 3 else None,
                parameter_norm=1e-9 if step == 1 else None,
                group_learning_rates=(0.1, 0.001),
                step_seconds=0.5,
                timestamp=1_700_000_000.25 + step,
                state=(State.HEALTHY, State.SPIKE, State.NONFINITE)[step - 1],
                findings=(odd,) if step > 1 else (),
                last_healthy_step=1,
                layers=LayerTable.from_rows(layers),
                diagnosis=Diagnosis(shape=Shape.SPIKE_CASCADE, severity=Severity.CRITICAL, since_step=2),
                first_nonfinite=FirstNonfinite(step=3, layer=AWKWARD, quantity=Quantity.LOSS) if step == 3 else None,
                nonfinite={"gradient": 2, "loss": 1} if step == 3 else {},
            ),
            itself,
        )
    return tally.snapshot


SNAPSHOTS = pytest.mark.parametrize("snapshot", [quiet(), story()], ids=["quiet", "story"])


def rendered(snapshot: Snapshot, format: Format = Format.TEXT, renderer: Renderer | None = None) -> str:
    _, families = Source(lambda: snapshot, 2000, Failures()).families(tuple(Section))
    end = "# EOF\n" if format is Format.OPENMETRICS else ""
    return b"".join((renderer or Renderer()).render(snapshot.identity, families, format)).decode() + end


def registered(read: Callable[[], Snapshot]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(read))
    return registry


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [sample for family in parse_text(text) for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(values) == len(found), "a series stands twice"
    return values


# -- the two formats --------------------------------------------------------------------------------


@SNAPSHOTS
def test_the_renderer_writes_what_prometheus_client_writes(snapshot: Snapshot) -> None:
    assert rendered(snapshot) == generate_latest(registered(lambda: snapshot)).decode()


@SNAPSHOTS
def test_the_renderer_writes_the_openmetrics_that_prometheus_client_writes(snapshot: Snapshot) -> None:
    expected = generate_openmetrics(registered(lambda: snapshot)).decode()

    assert rendered(snapshot, Format.OPENMETRICS) == expected


@SNAPSHOTS
def test_both_formats_say_the_same(snapshot: Snapshot) -> None:
    openmetrics = rendered(snapshot, Format.OPENMETRICS)
    strict = [sample for family in parse_openmetrics(openmetrics) for sample in family.samples]
    assert {(sample.name, frozenset(sample.labels.items())) for sample in strict} == samples(rendered(snapshot)).keys()


@pytest.mark.parametrize(("name", "snapshot"), [("scrape_quiet", quiet()), ("scrape", story())])
@pytest.mark.parametrize("format", Format, ids=lambda format: format.name.lower())
def test_a_scrape_is_what_it_was(
    golden: Callable[[str, str], None], name: str, snapshot: Snapshot, format: Format
) -> None:
    text = rendered(snapshot, format)
    text = text.replace(f'python="{platform.python_version()}"', 'python="3"')
    text = text.replace(f'version="{__version__}"', 'version="0"')
    golden(f"{name}.{'txt' if format is Format.TEXT else 'openmetrics.txt'}", text)


@pytest.mark.parametrize("path", METRICS_PATHS)
@SNAPSHOTS
def test_promtool_finds_nothing_to_say(tool: Callable[..., str], snapshot: Snapshot, path: str) -> None:
    failures = Failures()
    page = Pages(lambda: snapshot, 2000, failures).answer(Request("GET", path, {}, True)).body
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=page, capture_output=True, check=False)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    assert failures.seen == []


def test_a_renderer_forgets_nothing_and_repeats_nothing() -> None:
    """It keeps lines between scrapes: of another step, other layers, another run."""
    renderer = Renderer()
    other = Tally(Identity(run_id="run-2", rank=7), clock=lambda: 5.0)
    for snapshot in (quiet(), story(), quiet(), other.snapshot, story(), story()):
        for format in Format:
            assert rendered(snapshot, format, renderer) == rendered(snapshot, format)


def test_labels_are_escaped_and_read_back_as_they_were() -> None:
    read_back = samples(rendered(story()))

    (info,) = [dict(labels) for name, labels in read_back if name == "gradexporter_run_info"]
    assert info["team"] == AWKWARD
    assert ("layer", AWKWARD) in {pair for _, labels in read_back for pair in labels}


def test_readings_that_are_not_finite_are_written_as_prometheus_reads_them() -> None:
    text = rendered(story())

    assert 'gradexporter_loss{rank="0",run_id="run-1"} NaN\n' in text
    assert 'gradexporter_gradient_norm{rank="0",run_id="run-1"} +Inf\n' in text
    assert 'gradexporter_gradient_norm_peak{rank="0",run_id="run-1"} +Inf\n' in text
    assert 'gradexporter_layer_gradient_norm{layer="encoder.0",rank="0",run_id="run-1"} +Inf\n' in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (0, "0.0"),
        (True, "1.0"),
        (-0.25, "-0.25"),
        (999_999.5, "999999.5"),
        (1e6, "1e+06"),
        (1_234_567.5, "1.2345675e+06"),
        (1.5e12, "1.5e+12"),
        (1e300, "1e+300"),
        (1e-7, "1e-07"),
    ],
)
def test_a_number_is_written_as_go_would(value: float, text: str) -> None:
    assert number_text(value) == text


def test_bounds_are_canonical_so_that_no_server_renames_them() -> None:
    assert [bound_text(bound) for bound in (1e-6, 0.1, 1.0, 1e5, 1e6, 1e12, math.inf)] == [
        "1e-06",
        "0.1",
        "1.0",
        "100000.0",
        "1e+06",
        "1e+12",
        "+Inf",
    ]


def test_the_histogram_counts_finite_norms_and_has_sum_and_count() -> None:
    lines = [line for line in rendered(story()).splitlines() if line.startswith("gradexporter_step_gradient_norm")]

    assert 'gradexporter_step_gradient_norm_bucket{le="1.0",rank="0",run_id="run-1"} 0.0' in lines
    assert 'gradexporter_step_gradient_norm_bucket{le="10.0",rank="0",run_id="run-1"} 1.0' in lines
    assert lines[-3:] == [
        'gradexporter_step_gradient_norm_bucket{le="+Inf",rank="0",run_id="run-1"} 2.0',
        'gradexporter_step_gradient_norm_count{rank="0",run_id="run-1"} 2.0',
        'gradexporter_step_gradient_norm_sum{rank="0",run_id="run-1"} 1.2345695e+06',
    ]


def test_no_series_is_doubled_by_the_time_of_its_creation() -> None:
    page = Pages(story, 2000, Failures()).answer(Request("GET", "/metrics", {}, True)).body

    assert b"_created" not in page


# -- identity, families, paths ----------------------------------------------------------------------


@SNAPSHOTS
def test_every_series_says_whose_it_is_and_takes_no_name_of_the_platform(snapshot: Snapshot) -> None:
    for name, labels in samples(rendered(snapshot)):
        assert {("run_id", "run-1"), ("rank", "0")} <= labels, name
        assert not {"job", "instance", "namespace", "pod", "container", "cluster"} & {label for label, _ in labels}


def page(pages: Pages, path: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(pages.answer(Request("GET", path, {}, True)).body.decode())


def test_core_and_layers_together_are_all_and_share_nothing() -> None:
    pages = Pages(story, 2000, Failures())
    everything, core, layers = (page(pages, path).keys() for path in METRICS_PATHS)

    assert core | layers == everything
    assert not core & layers
    assert {name for name, _ in layers} == {name for name, _ in everything if name.startswith("gradexporter_layer_")}


def test_the_process_is_shown_beside_the_run() -> None:
    names = {name for name, _ in page(Pages(story, 2000, Failures()), "/metrics/core")}

    assert {"process_cpu_seconds_total", "python_info", "python_gc_collections_total"} <= names


@SNAPSHOTS
def test_the_number_of_series_is_published_and_the_same_on_each_path(snapshot: Snapshot) -> None:
    pages = Pages(lambda: snapshot, 2000, Failures())
    ours = [name for name, _ in page(pages, "/metrics") if name.startswith("gradexporter_")]
    for path in ("/metrics", "/metrics/core"):
        published = {name: value for (name, _), value in page(pages, path).items()}
        assert published["gradexporter_series"] == len(ours)


@SNAPSHOTS
def test_a_scrape_changes_nothing(snapshot: Snapshot) -> None:
    def ours(pages: Pages) -> dict[object, str]:
        return {key: repr(value) for key, value in page(pages, "/metrics").items() if key[0].startswith("gradexporter")}

    first, second = (Pages(lambda: snapshot, 2000, Failures()) for _ in range(2))

    assert ours(first) == ours(first) == ours(second) == ours(first)


# -- the collector ----------------------------------------------------------------------------------


def test_registering_does_not_scrape() -> None:
    def read() -> Snapshot:
        raise AssertionError("nobody asked yet")

    registry = registered(read)

    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PrometheusCollector(read))


def test_what_is_described_is_what_is_collected() -> None:
    collector = PrometheusCollector(story)

    def heads(metrics: Iterator[Metric]) -> list[tuple[str, str, str, str]]:
        return [(metric.name, metric.documentation, metric.type, metric.unit) for metric in metrics]

    assert heads(collector.describe()) == heads(collector.collect())
    assert len(heads(collector.describe())) == len(CATALOG)


def test_a_collector_reads_one_snapshot_a_scrape() -> None:
    """Two of them would mix two steps."""
    reads: list[Snapshot] = []

    def read() -> Snapshot:
        reads.append(story())
        return reads[-1]

    list(PrometheusCollector(read).collect())

    assert len(reads) == 1


def test_a_collector_may_leave_layers_out() -> None:
    collector = PrometheusCollector(story, sections=METRICS_PATHS["/metrics/core"])

    assert not any("_layer_" in metric.name for metric in (*collector.collect(), *collector.describe()))


class Broken(Mapping[str, bool]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: str) -> bool:
        raise KeyError(key)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("cannot be read")


def test_a_family_that_cannot_be_read_costs_itself_alone() -> None:
    tally = Tally(Identity(run_id="r"), clock=lambda: 5.0)
    snapshot = tally.refresh(SelfStats(signal_available=Broken(), watched_layers=3))
    failures = Failures()

    shown = {name for name, _ in page(Pages(lambda: snapshot, 2000, failures), "/metrics")}

    assert "gradexporter_signal_available" not in shown
    assert {"gradexporter_watched_layers", "gradexporter_findings_total"} <= shown
    assert failures.seen == [("endpoint", "RuntimeError('cannot be read')")]


def test_layers_that_cannot_be_chosen_from_cost_the_layers_alone() -> None:
    torn = LayerTable(("a", "a"), {"gradient_norm": (np.ones(1), np.ones(1, dtype=bool))})
    snapshot = dataclasses.replace(story(), layers=torn)
    failures = Failures()

    shown = {name for name, _ in page(Pages(lambda: snapshot, 2000, failures), "/metrics")}

    assert "gradexporter_layer_gradient_norm" not in shown
    assert "gradexporter_findings_total" in shown
    assert [part for part, _ in failures.seen] == ["endpoint"]


# -- cost -------------------------------------------------------------------------------------------


def test_ten_thousand_series_cost_a_fraction_of_what_prometheus_client_takes() -> None:
    """Rendering holds the GIL, and with it the training loop."""
    tally = Tally(Identity(run_id="run-1"), clock=lambda: 5.0)
    names = tuple(f"model.layers.{index}.mlp.down_proj" for index in range(840))
    everywhere = np.ones(len(names), dtype=bool)
    random = np.random.default_rng(1)
    columns = [spec.path.removeprefix("layer_") for spec in CATALOG if spec.section is Section.LAYER]

    def step() -> Snapshot:
        table = LayerTable(names, {column: (random.lognormal(0, 2, len(names)), everywhere) for column in columns})
        return tally.add(StepReport(step=1, layers=table), SelfStats())

    pages, latest = Pages(lambda: tally.snapshot, 20_000, Failures()), CollectorRegistry()
    latest.register(PrometheusCollector(lambda: tally.snapshot, 20_000))
    scrape = Request("GET", "/metrics", {}, True)
    ours, theirs = [], []
    for _ in range(5):
        step()
        began = time.thread_time()
        body = gzipped(pages.answer(scrape).body)
        ours.append(time.thread_time() - began)
        began = time.thread_time()
        generate_latest(latest)
        theirs.append(time.thread_time() - began)

    assert len(body) > 10_000
    print(ours, theirs)
    assert min(ours) < min(theirs) / 3
