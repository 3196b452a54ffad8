"""Running totals: what is counted, what is kept, and what a snapshot promises."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from fakes import FakeClock

from gradexporter.records import (
    Finding,
    FindingKind,
    Histogram,
    Identity,
    LastFinding,
    LayerStats,
    LayerTable,
    Quantity,
    SelfStats,
    Severity,
    Snapshot,
    State,
    StepReport,
)
from gradexporter.tally import NORM_BOUNDS, Peak, Tally


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tally(clock: FakeClock) -> Tally:
    return Tally(Identity(run_id="r"), clock)


def add(tally: Tally, **fields: object) -> Snapshot:
    fields.setdefault("step", 1)
    return tally.add(StepReport(**fields), SelfStats())  # type: ignore[arg-type]


def spike(step: int) -> Finding:
    return Finding(
        kind=FindingKind.GRADIENT_SPIKE, severity=Severity.WARNING, step=step, quantity=Quantity.GRADIENT, layer="a"
    )


def table(*rows: LayerStats) -> LayerTable:
    return LayerTable.from_rows(rows)


def column(table: LayerTable, name: str) -> dict[str, float]:
    pair = table.column(name)
    assert pair is not None
    values, observed = pair
    return {layer: value for layer, value, seen in zip(table.names, values, observed, strict=True) if seen}


# -- steps and events -----------------------------------------------------------------------------


def test_steps_are_counted_by_outcome_and_an_unknown_one_is_applied(tally: Tally) -> None:
    add(tally, applied=True)
    add(tally, applied=None)
    snapshot = add(tally, applied=False)

    assert (snapshot.steps_applied, snapshot.steps_skipped) == (2, 1)


def test_seconds_and_clipped_steps_add_up(tally: Tally) -> None:
    add(tally, step_seconds=0.5, clip_factor=0.1)
    add(tally, step_seconds=None, clip_factor=1.0)
    add(tally, step_seconds=0.25, clip_factor=math.nan)
    snapshot = add(tally, clip_factor=0.1, applied=False)

    assert snapshot.step_seconds == 0.75
    assert snapshot.clipped_steps == 1


def test_findings_are_counted_once_a_step_and_the_last_is_kept(tally: Tally, clock: FakeClock) -> None:
    add(tally, step=4, findings=(spike(4), spike(4)), timestamp=123.0)
    add(tally, step=5)
    before = tally.snapshot
    snapshot = add(tally, step=6, findings=(spike(6),))

    assert before.findings[FindingKind.GRADIENT_SPIKE] == 1
    assert before.last_findings == {FindingKind.GRADIENT_SPIKE: LastFinding(step=4, timestamp=123.0)}
    assert snapshot.findings[FindingKind.GRADIENT_SPIKE] == 2
    assert snapshot.last_findings[FindingKind.GRADIENT_SPIKE] == LastFinding(step=6, timestamp=clock.now)
    assert snapshot.findings[FindingKind.NONFINITE] == 0


def test_a_single_layers_spike_is_no_spike_of_the_run(tally: Tally) -> None:
    """Alerts about the run read these series, and such a finding is info."""
    note = dataclasses.replace(spike(4), severity=Severity.INFO, layer="fc1")
    snapshot = add(tally, step=4, findings=(note,))

    assert snapshot.findings[FindingKind.GRADIENT_SPIKE] == 0
    assert snapshot.last_findings == {}


def nonfinite(snapshot: Snapshot) -> set[str]:
    return {str(quantity) for quantity, count in snapshot.nonfinite_steps.items() if count}


def test_a_step_is_nonfinite_in_each_quantity_that_has_such_elements(tally: Tally) -> None:
    snapshot = add(tally, nonfinite={"activation": 3, "loss": 0, "something_else": 2})
    assert nonfinite(snapshot) == {"activation"}

    assert snapshot.nonfinite_steps[Quantity.ACTIVATION] == 1
    assert add(tally, nonfinite={Quantity.ACTIVATION: 1}).nonfinite_steps[Quantity.ACTIVATION] == 2


@pytest.mark.parametrize(
    ("field", "quantity"),
    [
        ("loss", "loss"),
        ("gradient_norm", "gradient"),
        ("activation_max_abs", "activation"),
        ("parameter_norm", "parameter"),
        ("momentum_max_abs", "optimizer_state"),
        ("input_max_abs", "input"),
    ],
)
def test_a_magnitude_that_is_not_finite_counts_although_no_element_was_counted(
    tally: Tally, field: str, quantity: str
) -> None:
    assert nonfinite(add(tally, **{field: math.inf})) == {quantity}


def test_a_reading_that_is_carried_over_is_not_counted_again(tally: Tally) -> None:
    add(tally, parameter_norm=math.nan)

    assert add(tally).nonfinite_steps[Quantity.PARAMETER] == 1


def test_gradients_of_a_skipped_update_are_how_a_scaler_works_and_a_lost_loss_is_not(tally: Tally) -> None:
    snapshot = add(tally, applied=False, gradient_norm=math.inf, nonfinite={"gradient": 7}, loss=math.nan)

    assert nonfinite(snapshot) == {"loss"}


# -- histogram and peaks --------------------------------------------------------------------------


def test_every_finite_norm_is_in_its_decade(tally: Tally) -> None:
    for norm in (0.0, 1e-6, 0.5, 1.0, 1.5, 1e12, 1e13):
        add(tally, gradient_norm=norm)

    histogram = tally.snapshot.gradient_norms
    up_to = dict(zip(histogram.bounds, histogram.counts, strict=True))
    assert (up_to[1e-6], up_to[0.1], up_to[1.0], up_to[10.0], up_to[1e12], up_to[math.inf]) == (2, 2, 4, 5, 6, 7)
    assert histogram.sum == 0.0 + 1e-6 + 0.5 + 1.0 + 1.5 + 1e12 + 1e13


def test_the_histogram_knows_no_nan_and_no_infinity(tally: Tally) -> None:
    """One NaN in a sum stays there for the life of the process."""
    for norm in (math.nan, math.inf, None):
        add(tally, gradient_norm=norm)

    assert tally.snapshot.gradient_norms == Histogram(bounds=NORM_BOUNDS, counts=(0,) * len(NORM_BOUNDS), sum=0.0)


def test_a_peak_outlives_the_step_and_leaves_after_its_window() -> None:
    peak = Peak(window_seconds=60.0)
    assert peak.add(50.0, now=600.0) == 50.0
    assert peak.add(1.0, now=629.0) == 50.0
    assert peak.add(2.0, now=631.0) == 50.0
    assert peak.add(1.0, now=659.0) == 50.0
    assert peak.add(1.0, now=661.0) == 2.0


def test_a_peak_after_a_long_pause_is_of_the_present() -> None:
    peak = Peak(window_seconds=60.0)
    peak.add(50.0, now=600.0)

    assert peak.add(3.0, now=900.0) == 3.0
    assert peak.add(4.0, now=600.0) == 4.0, "a clock that was set back starts over"


def test_infinity_is_a_peak_and_nan_leaves_it() -> None:
    peak = Peak()
    assert peak.add(None, now=0.0) is None
    assert peak.add(math.nan, now=0.0) is None
    assert peak.add(7.0, now=1.0) == 7.0
    assert peak.add(math.nan, now=2.0) == 7.0
    assert peak.add(math.inf, now=3.0) == math.inf


def test_the_tally_keeps_the_peaks_of_norm_and_ratio(tally: Tally, clock: FakeClock) -> None:
    add(tally, gradient_norm=300.0, gradient_spike_ratio=30.0)
    clock.advance(10)
    snapshot = add(tally, gradient_norm=10.0, gradient_spike_ratio=1.0)
    assert (snapshot.gradient_norm_peak, snapshot.gradient_spike_ratio_peak) == (300.0, 30.0)

    clock.advance(61)
    snapshot = add(tally, gradient_norm=10.0, gradient_spike_ratio=1.0)
    assert (snapshot.gradient_norm_peak, snapshot.gradient_spike_ratio_peak) == (10.0, 1.0)


# -- what is sampled --------------------------------------------------------------------------------


def test_a_sampled_statistic_keeps_its_last_reading_and_the_report_stays_what_it_was(tally: Tally) -> None:
    add(tally, step=1, parameter_norm=5.0, loss=1.0)
    snapshot = add(tally, step=2)

    (reading,) = snapshot.readings
    assert (reading.step, reading.parameter_norm, reading.loss) == (2, 5.0, None)
    assert snapshot.report is not None
    assert snapshot.report.parameter_norm is None


def test_a_sampled_column_keeps_its_last_reading_and_a_gradient_does_not(tally: Tally) -> None:
    add(tally, layers=table(LayerStats(layer="a", activation_rms=0.5, gradient_norm=2.0), LayerStats(layer="b")))
    snapshot = add(tally, layers=table(LayerStats(layer="a"), LayerStats(layer="b")))

    assert column(snapshot.layers, "activation_rms") == {"a": 0.5}
    assert snapshot.layers.column("gradient_norm") is None


def test_a_layer_that_did_not_run_when_activations_were_read_has_none(tally: Tally) -> None:
    add(tally, layers=table(LayerStats(layer="a", activation_rms=0.5), LayerStats(layer="b", activation_rms=0.7)))
    snapshot = add(tally, layers=table(LayerStats(layer="a", activation_rms=0.4), LayerStats(layer="b")))

    assert column(snapshot.layers, "activation_rms") == {"a": 0.4}


def test_a_step_without_layers_leaves_sampled_columns_and_totals(tally: Tally) -> None:
    add(tally, layers=table(LayerStats(layer="a", activation_rms=0.5, gradient_nonfinite=3.0, gradient_norm=1.0)))
    snapshot = add(tally)

    assert column(snapshot.layers, "activation_rms") == {"a": 0.5}
    assert snapshot.layers.column("gradient_norm") is None
    assert column(snapshot.layer_totals, "gradient_nonfinite") == {"a": 3.0}


def test_nonfinite_elements_of_layers_add_up_from_0(tally: Tally) -> None:
    clean = table(LayerStats(layer="a", gradient_nonfinite=0.0), LayerStats(layer="b"))
    odd = table(LayerStats(layer="a", gradient_nonfinite=2.0), LayerStats(layer="b", gradient_nonfinite=1.0))

    assert column(add(tally, layers=clean).layer_totals, "gradient_nonfinite") == {"a": 0.0}
    assert column(add(tally, layers=odd).layer_totals, "gradient_nonfinite") == {"a": 2.0, "b": 1.0}
    assert column(add(tally, layers=clean).layer_totals, "gradient_nonfinite") == {"a": 2.0, "b": 1.0}
    assert column(add(tally, layers=odd).layer_totals, "gradient_nonfinite") == {"a": 4.0, "b": 2.0}


def test_totals_follow_their_layers_when_the_set_of_layers_changes(tally: Tally) -> None:
    rows = [LayerStats(layer=name, gradient_nonfinite=count) for name, count in (("a", 1.0), ("b", 2.0))]
    add(tally, layers=table(*rows))
    rows = [LayerStats(layer=name, gradient_nonfinite=0.0) for name in ("new", "b")]

    assert column(add(tally, layers=table(*rows)).layer_totals, "gradient_nonfinite") == {"new": 0.0, "b": 2.0}


def test_layers_of_two_optimizers_stand_together(tally: Tally) -> None:
    add(tally, layers=table(LayerStats(layer="a", gradient_norm=1.0, gradient_nonfinite=1.0)))
    snapshot = add(tally, layers=table(LayerStats(layer="b", gradient_norm=2.0, update_ratio=0.1)), optimizer=1)

    assert column(snapshot.layers, "gradient_norm") == {"a": 1.0, "b": 2.0}
    assert column(snapshot.layers, "update_ratio") == {"b": 0.1}
    assert column(snapshot.layer_totals, "gradient_nonfinite") == {"a": 1.0}
    assert snapshot.layer_totals.names == snapshot.layers.names


def test_each_optimizer_keeps_its_own_last_report(tally: Tally) -> None:
    add(tally, step=1, state=State.SPIKE, optimizer=1, parameter_norm=3.0)
    add(tally, step=2, state=State.HEALTHY, optimizer=0)
    snapshot = add(tally, step=3, state=State.HEALTHY, optimizer=0)

    assert [(report.optimizer, report.step) for report in snapshot.reports] == [(0, 3), (1, 1)]
    assert [reading.parameter_norm for reading in snapshot.readings] == [None, 3.0]
    assert snapshot.state is State.SPIKE
    assert snapshot.report is not None
    assert snapshot.report.step == 3


# -- checkpoints and the life of a run ------------------------------------------------------------


def test_a_checkpoint_is_clean_up_to_the_last_healthy_step(tally: Tally, clock: FakeClock) -> None:
    add(tally, step=100, last_healthy_step=100)
    tally.checkpoint(100)
    add(tally, step=200, last_healthy_step=150)
    snapshot = tally.checkpoint(200)
    assert (snapshot.last_checkpoint_step, snapshot.last_clean_checkpoint_step) == (200, 100)
    assert snapshot.last_checkpoint_timestamp == clock.now

    assert add(tally, step=201, last_healthy_step=201).last_clean_checkpoint_step == 200


def test_no_checkpoint_is_clean_before_a_step_was_healthy(tally: Tally) -> None:
    assert tally.checkpoint(5).last_clean_checkpoint_step is None
    assert add(tally, step=6).last_clean_checkpoint_step is None
    assert add(tally, step=7, last_healthy_step=4).last_clean_checkpoint_step is None


def test_a_checkpoint_is_clean_only_where_every_optimizer_was_healthy(tally: Tally) -> None:
    tally.checkpoint(10)
    tally.checkpoint(20)
    add(tally, step=21, last_healthy_step=21)
    assert add(tally, step=21, last_healthy_step=12, optimizer=1).last_clean_checkpoint_step == 10
    assert add(tally, step=22, last_healthy_step=None, optimizer=1).last_clean_checkpoint_step is None


def test_the_newest_thousand_checkpoints_are_remembered(tally: Tally) -> None:
    for step in range(1, 1500):
        tally.checkpoint(step)

    assert add(tally, step=1500, last_healthy_step=1000).last_clean_checkpoint_step == 1000
    assert add(tally, step=1500, last_healthy_step=499).last_clean_checkpoint_step is None


def test_phase_refresh_and_end_change_nothing_else(tally: Tally) -> None:
    itself = SelfStats(watched_layers=3)
    assert tally.refresh(itself).itself is itself
    before = add(tally, loss=1.0)

    assert tally.phase("eval") == dataclasses.replace(before, phase="eval")
    assert tally.end("closed", itself) == dataclasses.replace(before, phase="eval", ended="closed", itself=itself)


def test_a_snapshot_never_changes(tally: Tally) -> None:
    """A scrape that took one reads the same from it, whatever training does meanwhile."""
    layers = table(LayerStats(layer="a", gradient_norm=1.0, gradient_nonfinite=1.0))
    first = add(tally, layers=layers, gradient_norm=1.0, nonfinite={"gradient": 1}, findings=(spike(1),))
    was = (dict(first.findings), dict(first.nonfinite_steps), first.gradient_norms, dict(first.last_findings))
    total = column(first.layer_totals, "gradient_nonfinite")

    add(tally, step=2, layers=layers, gradient_norm=1.0, nonfinite={"gradient": 1}, findings=(spike(2),))

    assert was == (dict(first.findings), dict(first.nonfinite_steps), first.gradient_norms, dict(first.last_findings))
    assert total == column(first.layer_totals, "gradient_nonfinite") == {"a": 1.0}


def test_publishing_a_step_costs_the_same_for_ten_times_the_layers(tally: Tally) -> None:
    """Arrays, not a Python object a layer: the worker shares the GIL with training."""

    def seconds(layers: int) -> float:
        names = tuple(f"layer.{index}" for index in range(layers))
        ones = np.ones(layers)
        columns = {name: (ones, np.ones(layers, dtype=bool)) for name in ("gradient_norm", "gradient_nonfinite")}
        one = Tally(Identity(run_id="r"), FakeClock())
        spent = []
        for step in range(1, 40):
            report = StepReport(step=step, layers=LayerTable(names, dict(columns)))
            began = time.thread_time()
            one.add(report, SelfStats())
            spent.append(time.thread_time() - began)
        return min(spent)

    assert seconds(3000) < 4 * seconds(300)


def test_the_aligned_norm_is_that_of_the_last_step_that_aligned_every_divides() -> None:
    tally = Tally(Identity(run_id="r"), FakeClock(), aligned_every=3)
    seen = []
    for step, norm in enumerate([1.0, 2.0, math.nan, 4.0, 5.0, None, 7.0], start=1):
        snapshot = tally.add(StepReport(step=step, gradient_norm=norm), SelfStats())
        seen.append((snapshot.aligned_step, str(snapshot.aligned_gradient_norm)))

    assert seen == [(None, "None")] * 2 + [(3, "nan")] * 3 + [(6, "None")] * 2
