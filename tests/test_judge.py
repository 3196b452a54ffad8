"""The verdict on a run: states, what is kept between steps, and that no report can break it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from histories import LAYERS, History, calm
from hypothesis import given, settings
from hypothesis import strategies as st

from gradexporter.config import Config, JudgeConfig
from gradexporter.judge import Judge
from gradexporter.records import (
    FLOAT32_MAX,
    LAYER_COLUMNS,
    FindingKind,
    LayerStats,
    LayerTable,
    Quantity,
    Severity,
    Shape,
    State,
    StepReport,
)


def test_a_fresh_judge_says_warming_up():
    judge = Judge()
    report = judge(
        StepReport(
            step=54,
            loss=90.5,
            gradient_norm=383.1,
            gradient_max_abs=160.0,
            activation_max_abs=665.0,
            momentum_max_abs=158.0,
            parameter_max_abs=36.5,
            parameter_norm=None,
            update_ratio=0.48,
            learning_rate=0.05,
            input_max_abs=16.0,
            target_max_abs=None,
            nonfinite={},
            applied=True,
            layers=LayerTable.from_rows([LayerStats(layer="6", gradient_norm=301.0)]),
        )
    )

    assert report.state is State.WARMING_UP
    assert report.findings == ()
    assert report.diagnosis is None
    assert report.last_healthy_step is None
    assert report.gradient_norm_baseline is None
    assert report.gradient_spike_ratio is None


def test_the_settings_of_a_judge_are_its_own_or_those_of_the_whole():
    tolerant = JudgeConfig(spike_decades=2.0)

    for judge in (Judge(tolerant), Judge(Config(judge=tolerant))):
        history = History(judge)
        history.run(40)
        history.run(1, gradient_norm=50.0)
        assert history.kinds == []


def test_measurements_are_left_as_they_were():
    before = StepReport(step=1, loss=2.0, gradient_norm=1.0, nonfinite={"input": 0}, loss_scale=4.0)
    after = Judge()(before)

    judged = ("state", "findings", "diagnosis", "last_healthy_step", "first_nonfinite", "layers")
    for field in dataclasses.fields(StepReport):
        if field.name not in judged:
            kept = getattr(after, field.name)
            assert kept == getattr(before, field.name) or field.name.startswith(("gradient_", "overflow", "steps_to"))
    assert after.gradient_norm == 1.0


# -- states ---------------------------------------------------------------------------------------


def test_a_run_warms_up_for_ten_steps_and_is_healthy_then():
    assert calm(14).states == "w" * 10 + "h" * 4


def test_a_spike_is_over_after_sixteen_clean_steps():
    history = calm(20)
    history.run(1, gradient_norm=30.0)
    history.run(20)

    assert history.states[20:] == "s" * 16 + "h" * 5


def test_the_last_healthy_step_stands_still_while_a_run_is_not_healthy():
    history = calm(20)
    history.run(1, gradient_norm=30.0)
    assert history.run(10).last_healthy_step == 20
    assert history.run(20).last_healthy_step == 51


def test_a_restart_is_advised_from_the_last_healthy_step_where_a_jump_led_up_to_an_incident():
    history = calm(40)
    history.run(1, update_ratio=0.05)
    history.run(3)
    report = history.run(1, gradient_norm=40.0, parameter_max_abs=9.0)

    assert history.states[40:] == "hhhhc"
    assert report.last_healthy_step == 40
    assert report.diagnosis is not None
    assert "checkpoint of step 40 or earlier" in report.diagnosis.advice[1]


def test_the_last_healthy_step_goes_on_once_a_jump_led_to_nothing():
    history = calm(40)
    history.run(1, update_ratio=0.05)

    assert history.run(15).last_healthy_step == 40
    assert history.run(1).last_healthy_step == 57


def test_one_loss_of_nan_is_healthy_again_after_sixteen_clean_steps():
    history = calm(20)
    report = history.run(1, loss=math.nan, gradient_norm=0.0, gradient_max_abs=0.0)
    assert report.state is State.NONFINITE
    history.run(16)

    assert history.states[20:] == "n" * 16 + "h"
    assert history.kinds == [FindingKind.NONFINITE]


def test_a_run_steps_down_from_cascade_to_spike_before_it_is_healthy():
    history = calm(20)
    history.run(1, gradient_norm=30.0, parameter_max_abs=3.0)
    history.run(8)
    history.run(1, gradient_norm=30.0)
    history.run(20)

    assert history.states[20:] == "c" * 16 + "s" * 9 + "h" * 5


def test_a_spike_at_step_seven_neither_passes_unseen_nor_lifts_the_baseline():
    spiky, plain = History(), History()
    for history, norm in ((spiky, 60.0), (plain, 1.0)):
        history.run(6)
        history.run(1, gradient_norm=norm)
        history.run(30)

    assert spiky.kinds == [FindingKind.GRADIENT_SPIKE]
    assert spiky.states[6] == "s"
    assert spiky.reports[-1].gradient_norm_baseline == pytest.approx(plain.reports[-1].gradient_norm_baseline, rel=0.1)


def test_a_cascade_does_not_move_the_baseline_that_it_is_held_against():
    history = calm(40)
    history.run(1, gradient_norm=30.0, parameter_max_abs=4.0)
    at_onset = history.run(1, gradient_norm=60.0, parameter_max_abs=8.0).gradient_norm_baseline
    history.run(12, gradient_norm=1e6, parameter_max_abs=9e3)

    assert history.reports[-1].state is State.CASCADE
    assert history.reports[-1].gradient_norm_baseline == at_onset


def test_a_level_that_rose_for_good_becomes_the_usual_one():
    history = calm(40)
    history.run(400, gradient_norm=30.0, parameter_max_abs=4.0)

    assert "c" in history.states
    assert history.reports[-1].state is State.HEALTHY
    assert history.reports[-1].gradient_norm_baseline == pytest.approx(30.0, rel=0.1)


def test_nan_before_warm_up_does_not_delay_the_baseline():
    history = History()
    history.run(3, gradient_norm=math.nan)
    history.run(30)

    assert history.states[-1] == "h"
    assert history.reports[-1].gradient_norm_baseline == pytest.approx(1.0, rel=0.2)


def test_a_run_whose_gradient_is_never_seen_leaves_warm_up_all_the_same():
    history = History()
    history.run(12, gradient_norm=None, layers={layer: {"gradient_norm": None} for layer in LAYERS})

    assert history.states == "w" * 10 + "hh"


def test_dropped_steps_do_not_end_an_incident():
    """Sixteen steps that nobody saw are not known to be clean."""
    history = calm(20)
    history.run(1, gradient_norm=30.0)
    later = History(history.judge, first_step=500)
    later.run(16)

    assert later.states == "s" * 15 + "h"


def test_findings_that_do_not_move_the_state_leave_the_run_healthy():
    history = calm(40)
    history.run(1, momentum_max_abs=50.0)
    history.run(1, learning_rate=0.1)
    history.run(1, loss=90.0)
    history.run(1, nonfinite={"input": 1})

    assert set(history.states[10:]) == {"h"}
    assert len(set(history.kinds)) == 4


# -- first non-finite -----------------------------------------------------------------------------


def nonfinite_layers(**statistics: dict[str, float]) -> dict[str, dict[str, float | None]]:
    return {layer: dict(cells) for layer, cells in statistics.items()}


def first_of(layers: dict[str, dict[str, float | None]] | None = None, **changes: Any) -> tuple[str, Quantity] | None:
    history = calm(20)
    first = history.run(1, layers=layers, **changes).first_nonfinite
    return None if first is None else (first.layer, first.quantity)


def test_the_first_activation_in_execution_order_comes_before_the_loss():
    layers = nonfinite_layers(
        first={"activation_nonfinite": 4.0, "execution_order": 2.0},
        last={"activation_nonfinite": 4.0, "execution_order": 0.0},
    )

    assert first_of(layers, loss=math.nan, gradient_norm=math.nan) == ("last", Quantity.ACTIVATION)


def test_without_an_execution_order_the_order_of_the_layers_counts():
    layers = {layer: {"activation_nonfinite": float(layer != "first"), "execution_order": None} for layer in LAYERS}

    assert first_of(layers) == ("middle", Quantity.ACTIVATION)


def test_a_loss_over_finite_activations_is_where_it_began():
    assert first_of(loss=math.inf, gradient_norm=math.nan) == ("loss", Quantity.LOSS)


def test_of_several_gradients_the_last_executed_layer_made_it():
    layers = nonfinite_layers(first={"gradient_nonfinite": 4.0}, middle={"gradient_nonfinite": 4.0})

    assert first_of(layers, gradient_norm=math.nan, nonfinite={"gradient": 8}) == ("middle", Quantity.GRADIENT)


def test_a_parent_with_weights_of_its_own_is_not_blamed_for_its_children():
    """It returns last, but what it owns may have acted first."""
    rows = [
        LayerStats(layer="net", gradient_nonfinite=4.0, execution_order=2.0),
        LayerStats(layer="net.body", gradient_nonfinite=4.0, execution_order=0.0),
        LayerStats(layer="net.head", gradient_nonfinite=4.0, execution_order=1.0),
    ]

    report = Judge()(StepReport(step=1, gradient_norm=math.nan, layers=LayerTable.from_rows(rows)))
    assert report.first_nonfinite is not None
    assert report.first_nonfinite.layer == "net.head"


def test_input_that_the_model_takes_up_is_where_it_began():
    layers = nonfinite_layers(first={"activation_nonfinite": 4.0})

    assert first_of(layers, nonfinite={"input": 1, "activation": 4}, loss=math.nan) == ("input", Quantity.INPUT)


def test_input_that_the_model_masks_is_no_non_finite_step():
    assert first_of(nonfinite={"input": 1}) is None


def test_an_update_after_finite_gradients_is_blamed_on_the_parameter():
    layers = nonfinite_layers(middle={"parameter_max_abs": math.nan})

    assert first_of(layers, parameter_max_abs=math.nan) == ("middle", Quantity.PARAMETER)


def test_optimizer_state_comes_last():
    assert first_of(second_moment_max_abs=math.inf) == ("optimizer_state", Quantity.OPTIMIZER_STATE)


def test_the_first_non_finite_place_of_a_run_is_kept():
    history = calm(20)
    history.run(1, loss=math.nan)
    history.run(40)
    report = history.run(1, parameter_max_abs=math.nan)

    assert report.first_nonfinite is not None
    assert (report.first_nonfinite.step, report.first_nonfinite.quantity) == (21, Quantity.LOSS)


# -- figures --------------------------------------------------------------------------------------


def test_the_spike_ratio_is_the_norm_over_its_baseline():
    history = calm(40)
    report = history.run(1, gradient_norm=5.0)

    assert report.gradient_norm_baseline is not None
    assert report.gradient_spike_ratio == pytest.approx(5.0 / report.gradient_norm_baseline)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_the_spike_ratio_of_a_norm_that_is_not_finite_is_not_finite_either(norm: float):
    history = calm(20)
    report = history.run(1, layers={"last": {"gradient_norm": norm}}, gradient_norm=norm)

    ratios = {row.layer: row.spike_ratio for row in report.layers.rows()}
    assert report.gradient_spike_ratio == pytest.approx(norm, nan_ok=True)
    assert ratios["last"] == pytest.approx(norm, nan_ok=True)
    assert ratios["first"] == pytest.approx(1.0, rel=0.5)


def test_there_is_no_spike_ratio_of_a_skipped_update_or_before_the_baseline():
    history = calm(20)

    assert history.run(1, gradient_norm=math.inf, applied=False).gradient_spike_ratio is None
    assert calm(2).run(1, gradient_norm=math.nan).gradient_spike_ratio is None


def test_layers_get_their_spike_ratio_where_they_have_a_baseline():
    history = calm(40)
    report = history.run(1, layers={"middle": {"gradient_norm": 6.0}, "last": {"gradient_norm": None}})

    ratios = {row.layer: row.spike_ratio for row in report.layers.rows()}
    assert ratios["middle"] == pytest.approx(10.0, rel=0.2)
    assert ratios["first"] == pytest.approx(1.0, rel=0.4)
    assert ratios["last"] is None


def test_headroom_is_that_of_the_value_nearest_to_its_limit():
    report = calm(20).run(1, activation_max_abs=65.504, dtype_max=65504.0, gradient_max_abs=1e10)

    assert report.overflow_headroom_decades == pytest.approx(3.0)


def test_steps_to_overflow_are_given_only_while_something_is_wrong():
    history = calm(40)
    assert history.run(1).steps_to_overflow is None
    for exponent in (2, 4, 8):
        report = history.run(1, gradient_norm=50.0, gradient_max_abs=10.0**exponent)

    assert report.steps_to_overflow == pytest.approx(2.3, abs=0.1)


def test_each_optimizer_has_baselines_of_its_own():
    judge = Judge()
    for step in range(1, 41):
        judge(StepReport(step=step, gradient_norm=1.0, optimizer=0))
        small = judge(StepReport(step=step, gradient_norm=1e-3, optimizer=1))

    assert small.gradient_norm_baseline == pytest.approx(1e-3)
    assert small.findings == ()


# -- saved baselines ------------------------------------------------------------------------------


def test_a_continued_run_needs_no_warm_up():
    before = calm(60)
    saved = json.loads(json.dumps(before.judge.state_dict()))
    judge = Judge()
    judge.load_state_dict(saved)

    after = History(judge, first_step=61)
    assert after.run(1).last_healthy_step == 61
    after.run(20)
    after.run(1, gradient_norm=30.0)

    assert after.states == "h" * 21 + "s"
    assert after.kinds == [FindingKind.GRADIENT_SPIKE]


def test_trouble_right_after_a_restart_is_a_mismatch():
    judge = Judge()
    judge.load_state_dict(calm(60).judge.state_dict())
    after = History(judge, first_step=61)
    after.run(2)
    after.run(1, gradient_norm=50.0, parameter_max_abs=5.0)

    assert after.reports[-1].diagnosis is not None
    assert after.reports[-1].diagnosis.shape is Shape.RESUME_MISMATCH


def test_optimizer_state_that_was_not_restored_is_a_mismatch():
    judge = Judge()
    judge.load_state_dict(calm(60).judge.state_dict())
    after = History(judge, first_step=61)
    report = after.run(1, second_moment_max_abs=1e-5)

    assert after.kinds == [FindingKind.OPTIMIZER_STATE_JUMP]
    assert report.diagnosis is not None
    assert report.diagnosis.shape is Shape.RESUME_MISMATCH


def test_trouble_long_after_a_restart_is_what_it_is():
    judge = Judge()
    judge.load_state_dict(calm(60).judge.state_dict())
    after = History(judge, first_step=61)
    after.run(30)
    report = after.run(1, gradient_norm=50.0, parameter_max_abs=5.0)

    assert report.diagnosis is not None
    assert report.diagnosis.shape is Shape.SPIKE_CASCADE


def test_a_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 7: 1 is known"):
        Judge().load_state_dict({"version": 7})


# -- whatever comes -------------------------------------------------------------------------------

sizes = st.one_of(
    st.none(),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-320, 1e308, -1.0, FLOAT32_MAX, 1.0]),
    st.floats(1e-6, 1e6),
)
cells = st.dictionaries(st.sampled_from(LAYER_COLUMNS), sizes, max_size=6)
tables = st.lists(
    st.tuples(st.sampled_from(["a", "b", "a.b", "", "c"]), cells), max_size=4, unique_by=lambda row: row[0]
)


@st.composite
def reports(draw: st.DrawFn) -> StepReport:
    fields = [
        "loss",
        "gradient_norm",
        "gradient_max_abs",
        "activation_max_abs",
        "momentum_max_abs",
        "second_moment_max_abs",
        "parameter_max_abs",
        "parameter_norm",
        "update_ratio",
        "learning_rate",
        "input_max_abs",
        "target_max_abs",
        "loss_scale",
    ]
    counts = st.dictionaries(
        st.sampled_from(["input", "activation", "loss", "gradient", "parameter", "optimizer_state"]),
        st.sampled_from([0, 1, 7.0, math.nan]),
        max_size=3,
    )
    return StepReport(
        step=draw(st.integers(0, 2**40)),
        nonfinite=draw(counts),
        applied=draw(st.sampled_from([True, False, None])),
        dtype_max=draw(st.sampled_from([FLOAT32_MAX, 65504.0])),
        layers=LayerTable.from_rows(LayerStats(layer=layer, **stats) for layer, stats in draw(tables)),
        **{field: draw(sizes) for field in draw(st.sets(st.sampled_from(fields), max_size=8))},
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(reports(), min_size=1, max_size=30), st.integers(1, 15))
def test_no_report_breaks_the_judge_or_its_baselines(received: list[StepReport], warm_up: int):
    history = calm(warm_up)
    judge = history.judge
    for report in received:
        judged = judge(report)

        assert judged.state in State
        assert all(finding.step == report.step and finding.severity in Severity for finding in judged.findings)
        bad = judged.first_nonfinite is not None
        assert bad or judged.state is not State.NONFINITE
        ratio, baseline = judged.gradient_spike_ratio, judged.gradient_norm_baseline
        assert ratio is None or (ratio > 0 if math.isfinite(report.gradient_norm or 0.0) else not math.isfinite(ratio))
        assert baseline is None or (math.isfinite(baseline) and baseline > 0)
    numbers = json.dumps(judge.state_dict(), allow_nan=True)
    for track in judge.state_dict()["optimizers"].values():
        for mean, top, _ in track["detector"]["baselines"]["series"].values():
            assert math.isfinite(mean)
            assert math.isfinite(top)
    assert json.loads(numbers)["version"] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(reports(), min_size=1, max_size=12))
def test_a_judge_says_the_same_twice(received: list[StepReport]):
    first, second = Judge(), Judge()

    for report in received:
        one, other = first(report), second(report)
        assert repr((one.state, one.findings, one.diagnosis)) == repr((other.state, other.findings, other.diagnosis))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.7, 1.4), min_size=20, max_size=80), st.integers(0, 10_000))
def test_a_run_that_varies_by_less_than_twice_is_healthy(noise: list[float], offset: int):
    judge = Judge()

    for step, factor in enumerate(noise, start=offset + 1):
        report = judge(StepReport(step=step, loss=2 * factor, gradient_norm=factor, parameter_max_abs=0.5))
        assert report.state in (State.WARMING_UP, State.HEALTHY)
        assert report.findings == ()


# -- cost -----------------------------------------------------------------------------------------


def wide_report(step: int, layers: int, noise: np.random.Generator) -> StepReport:
    observed = np.ones(layers, dtype=bool)
    columns = {
        name: (np.exp(noise.normal(0, 0.2, layers)), observed) for name in LAYER_COLUMNS if name != "spike_ratio"
    }
    columns["gradient_nonfinite"] = columns["activation_nonfinite"] = (np.zeros(layers), observed)
    columns["execution_order"] = (np.arange(layers, dtype=float), observed)
    columns["dtype_max"] = (np.full(layers, FLOAT32_MAX), observed)
    return StepReport(
        step=step,
        loss=2.0,
        gradient_norm=17.0,
        gradient_max_abs=1.0,
        activation_max_abs=9.0,
        momentum_max_abs=0.1,
        second_moment_max_abs=0.01,
        parameter_max_abs=1.0,
        update_ratio=1e-3,
        learning_rate=1e-3,
        layers=LayerTable(tuple(f"layers.{index}" for index in range(layers)), columns),
    )


def seconds_of_a_step(layers: int) -> float:
    """Thread time of the fastest of some judged steps."""
    noise = np.random.default_rng(0)
    judge = Judge()
    received = [wide_report(step, layers, noise) for step in range(1, 120)]
    best = math.inf
    for report in received:
        began = time.thread_time()
        judge(report)
        best = min(best, time.thread_time() - began) if report.step > 20 else best
    return best


def test_three_hundred_layers_cost_little_more_than_three():
    """No Python object a layer: a hundred times the layers is far from a hundred times the time."""
    few, many = seconds_of_a_step(3), seconds_of_a_step(300)

    assert many < 4 * few
    assert many < 2e-3


def test_the_judge_imports_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gradexporter.judge import Judge\n"
        "from gradexporter.records import StepReport\n"
        "print(Judge()(StepReport(step=1, loss=2.0, gradient_norm=1.0)).state)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "warming_up\n"
