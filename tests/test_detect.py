"""Every rule three times: it fires, it does not fire yet, and it leaves a look-alike alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from histories import LAYERS, History, calm

from gradexporter.config import ConfigError, JudgeConfig
from gradexporter.detect.baseline import Baselines
from gradexporter.detect.headroom import STEPS_CAP, Forecast, Headroom
from gradexporter.records import Finding, FindingKind, LayerStats, LayerTable, Quantity, Severity, StepReport

# -- baselines ------------------------------------------------------------------------------------


def taught(*norms: float | None, first_step: int = 1, every: int = 1, config: JudgeConfig | None = None) -> Baselines:
    """Baselines that have seen these gradient norms."""
    baselines = Baselines(config or JudgeConfig())
    for index, norm in enumerate(norms):
        baselines.observe(StepReport(step=first_step + index * every, gradient_norm=norm))
    return baselines


def usual(baselines: Baselines) -> float:
    return baselines.usual("gradient_norm") or math.nan


def test_a_baseline_is_the_median_of_its_warm_up():
    baselines = taught(1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0)

    assert usual(baselines) == pytest.approx(1.0)
    assert baselines.deviation("gradient_norm") == pytest.approx(math.log10(5))


def test_there_is_no_deviation_before_warm_up_is_over():
    baselines = taught(*[1.0] * 9, 5.0)

    assert math.isnan(baselines.deviation("gradient_norm"))
    assert not baselines.is_warm("gradient_norm")


def test_a_jump_in_warm_up_is_seen_and_not_learned():
    with_jump = taught(1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 60.0)
    without = taught(1.0, 1.1, 0.9, 1.0, 1.1, 0.9)

    assert with_jump.deviation("gradient_norm") == pytest.approx(math.log10(60), abs=0.05)
    with_jump.observe(StepReport(step=8, gradient_norm=1.0))
    without.observe(StepReport(step=8, gradient_norm=1.0))
    assert usual(with_jump) == usual(without)


def test_a_level_that_begins_in_warm_up_and_stays_becomes_the_usual_one():
    baselines = taught(0.001, 0.001, *[1.0] * 14)

    assert usual(baselines) == pytest.approx(1.0)
    assert baselines.deviation("gradient_norm") == pytest.approx(0.0, abs=0.01)


def test_a_spike_does_not_move_the_baseline_by_more_than_its_cap():
    baselines = taught(*[1.0] * 20, 1e30)

    baselines.observe(StepReport(step=22, gradient_norm=1.0))
    assert 1.0 < usual(baselines) < 1.05


@pytest.mark.parametrize("reading", [math.nan, math.inf, -math.inf, 0.0, -3.0, None])
def test_what_has_no_size_is_never_learned(reading: float | None):
    baselines = taught(*[1.0] * 20, reading)

    assert usual(baselines) == pytest.approx(1.0)
    assert math.isfinite(baselines.deviation("gradient_norm"))


def test_a_baseline_follows_a_lasting_change_within_its_memory():
    baselines = taught(*[1.0] * 20, *[4.0] * 200)

    assert usual(baselines) == pytest.approx(4.0, rel=0.1)


def test_a_baseline_does_not_sink_far_below_its_highest_level():
    baselines = taught(*[100.0] * 20, *[1e-3] * 500)

    assert usual(baselines) == pytest.approx(100 * 10**-0.7, rel=0.2)


def test_warm_up_counts_steps_so_that_a_sampled_series_is_soon_known():
    baselines = taught(1.0, 1.0, 50.0, every=10)

    assert baselines.deviation("gradient_norm") == pytest.approx(math.log10(50))


def test_learning_scales_with_the_steps_between_readings():
    dense = taught(*[1.0] * 20, *[4.0] * 40)
    sparse = taught(*[1.0] * 20, *[4.0] * 4, every=10)

    assert math.log10(usual(sparse)) == pytest.approx(math.log10(usual(dense)), abs=0.1)


def test_a_series_that_is_not_observed_keeps_its_last_deviation():
    baselines = taught(*[1.0] * 20, 7.0, None, None)

    assert baselines.deviation("gradient_norm") == pytest.approx(math.log10(7))


def layers_of(**norms: float) -> LayerTable:
    return LayerTable.from_rows(LayerStats(layer=layer, gradient_norm=norm) for layer, norm in norms.items())


def test_layers_keep_their_baselines_when_the_set_of_layers_changes():
    baselines = Baselines(JudgeConfig())
    for step in range(1, 21):
        baselines.observe(StepReport(step=step, layers=layers_of(head=1.0, body=2.0)))

    baselines.observe(StepReport(step=21, layers=layers_of(adapter=5.0, body=20.0)))

    adapter, body = baselines.layer_deviation("gradient_norm")
    assert math.isnan(adapter)
    assert body == pytest.approx(1.0)


def test_memory_does_not_grow_with_the_run():
    baselines = taught(*[1.0] * 20)
    sizes = {name: value.size for name, value in vars(baselines).items() if isinstance(value, np.ndarray)}

    for step in range(21, 2000):
        baselines.observe(StepReport(step=step, gradient_norm=1.0 + step % 3))

    assert sizes == {name: value.size for name, value in vars(baselines).items() if isinstance(value, np.ndarray)}


def test_saved_baselines_are_plain_python_and_go_on_where_they_were():
    baselines = Baselines(JudgeConfig())
    for step in range(1, 31):
        baselines.observe(StepReport(step=step, gradient_norm=3.0, layers=layers_of(head=1.0, body=2.0)))

    state = baselines.state_dict()
    again = Baselines(JudgeConfig())
    again.load_state_dict(state)
    again.observe(StepReport(step=31, gradient_norm=30.0, layers=layers_of(head=10.0, body=2.0)))

    assert {type(number) for numbers in state["series"].values() for number in numbers} == {float, int}
    assert again.deviation("gradient_norm") == pytest.approx(1.0)
    assert list(again.layer_deviation("gradient_norm")) == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("warmup_steps", 0),
        ("warmup_steps", 2.5),
        ("warmup_steps", True),
        ("tau_steps", 0.0),
        ("spike_decades", -1.0),
        ("spike_decades", math.nan),
        ("cascade_parameter_decades", "much"),
        ("clean_steps", 0),
    ],
)
def test_a_threshold_that_cannot_be_used_says_which_and_what_to_give(setting: str, value: object):
    with pytest.raises(ConfigError, match=rf"judge\.{setting} cannot be .*; .* is the default"):
        JudgeConfig(**{setting: value})  # type: ignore[arg-type]


# -- rules: fires, not yet, look-alike ------------------------------------------------------------


def only(history: History, kind: FindingKind) -> Finding:
    """The one finding of a run, which is of this kind."""
    assert history.kinds == [kind]
    return history.findings[0]


def test_a_gradient_spike_names_the_layer_that_stands_out():
    history = calm(40)
    history.run(1, gradient_norm=30.0, layers={"middle": {"gradient_norm": 29.0}})

    spike = only(history, FindingKind.GRADIENT_SPIKE)
    assert (spike.severity, spike.step, spike.layer, spike.quantity) == (
        Severity.WARNING,
        41,
        "middle",
        Quantity.GRADIENT,
    )
    assert spike.value == 30.0
    assert spike.baseline == pytest.approx(1.0, rel=0.2)
    assert spike.ratio == pytest.approx(30.0, rel=0.2)


def test_a_gradient_nine_times_its_usual_is_no_spike_yet():
    history = calm(40)
    history.run(1, gradient_norm=7.5)

    assert history.kinds == []


def test_a_norm_that_jumps_from_next_to_nothing_is_no_spike():
    """In the interpolation regime norms rise a thousandfold without harm."""
    history = calm(40)
    history.run(400, gradient_norm=1e-4, loss=1e-5)
    history.run(1, gradient_norm=0.5, loss=1e-3)

    assert history.kinds == []


def test_a_single_layers_spike_is_info_and_moves_no_state():
    history = calm(40)
    history.run(1, layers={"middle": {"gradient_norm": 30.0}})

    spike = only(history, FindingKind.GRADIENT_SPIKE)
    assert (spike.severity, spike.layer, spike.value) == (Severity.INFO, "middle", 30.0)
    assert set(history.states[10:]) == {"h"}


def test_a_layer_that_stays_large_is_noted_once_and_not_at_every_step():
    history = calm(40)
    history.run(50, layers={"middle": {"gradient_norm": 60.0}})

    assert history.kinds == [FindingKind.GRADIENT_SPIKE]


def test_a_spike_that_the_weights_follow_is_a_cascade():
    history = calm(40)
    report = history.run(1, gradient_norm=30.0, parameter_max_abs=3.0, layers={"last": {"gradient_norm": 30.0}})

    cascade = history.of(FindingKind.GRADIENT_CASCADE)[0]
    assert (cascade.severity, cascade.layer, cascade.value) == (Severity.CRITICAL, "last", 30.0)
    assert report.state is not None
    assert report.state.value == "cascade"


HARD_BATCH = {"gradient_norm": 80.0, "input_max_abs": 24.0, "parameter_max_abs": 3.2}


def test_weights_that_one_batch_out_of_range_threw_and_that_come_back_are_a_spike():
    history = calm(40)
    history.run(1, **HARD_BATCH)
    for norm, largest in ((40.0, 3.1), (15.0, 3.0), (5.0, 2.9)):
        history.run(1, gradient_norm=norm, parameter_max_abs=largest)
    history.run(20, parameter_max_abs=2.8)

    assert FindingKind.GRADIENT_CASCADE not in history.kinds
    assert history.states[40:44] == "ssss"


def test_weights_that_grow_past_where_a_batch_threw_them_are_a_cascade():
    history = calm(40)
    history.run(1, **HARD_BATCH)
    history.run(1, gradient_norm=40.0, parameter_max_abs=3.1)
    history.run(1, gradient_norm=90.0, parameter_max_abs=4.0)

    assert history.states[40:] == "ssc"


@pytest.mark.parametrize(
    "before", [{"gradient_norm": 20.0}, HARD_BATCH], ids=["a spike before it", "a batch before it"]
)
def test_only_the_batch_of_a_first_spike_excuses_its_weights(before: dict[str, float]):
    history = calm(40)
    history.run(1, **before)
    history.run(1, **{**HARD_BATCH, "parameter_max_abs": 4.0})

    assert history.states[40:] == "sc"


def test_weights_that_a_batch_threw_thirty_times_up_are_a_cascade_at_once():
    history = calm(40)
    history.run(1, **{**HARD_BATCH, "parameter_max_abs": 30.0})

    assert history.states[40:] == "c"


def test_weights_that_follow_after_sixteen_steps_are_no_cascade_any_more():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    history.run(16)
    history.run(1, parameter_max_abs=3.0)

    assert FindingKind.GRADIENT_CASCADE not in history.kinds


def test_weights_that_grow_without_a_spike_are_no_cascade():
    history = calm(40)
    for step in range(20):
        history.run(1, parameter_max_abs=0.8 + 0.2 * step)

    assert history.kinds == []


def test_weights_seen_only_every_tenth_step_still_make_a_cascade():
    history = History()
    for step in range(1, 70):
        sampled = step % 10 == 1
        hot = step >= 55
        history.run(
            1,
            gradient_norm=40.0 if hot else 1.0,
            parameter_max_abs=(5.0 if hot else 0.8) if sampled else None,
        )

    assert FindingKind.GRADIENT_CASCADE in history.kinds
    assert history.of(FindingKind.GRADIENT_CASCADE)[0].step == 61


def test_without_parameter_readings_two_surges_of_three_steps_are_a_cascade():
    history = calm_without_parameters()
    history.run(1, gradient_norm=300.0, parameter_max_abs=None)
    assert FindingKind.GRADIENT_CASCADE not in history.kinds
    history.run(1, gradient_norm=1.0, parameter_max_abs=None)
    history.run(1, gradient_norm=300.0, parameter_max_abs=None)

    assert FindingKind.GRADIENT_CASCADE in history.kinds


def calm_without_parameters() -> History:
    history = History()
    history.run(40, parameter_max_abs=None)
    return history


def test_weights_that_run_away_under_a_saturated_gradient_are_a_cascade():
    history = calm(40)
    for step in range(60):
        history.run(1, parameter_max_abs=0.8 * 1.2**step, activation_max_abs=5.0)

    cascade = history.of(FindingKind.GRADIENT_CASCADE)[0]
    assert (cascade.quantity, cascade.layer) == (Quantity.PARAMETER, "first")
    assert cascade.ratio is not None
    assert cascade.ratio > 30


def test_weights_that_jump_once_and_stay_do_not_run_away():
    history = calm(40)
    history.run(60, parameter_max_abs=800.0)

    assert FindingKind.GRADIENT_CASCADE not in history.kinds


def test_weights_that_grow_while_the_model_learns_do_not_run_away():
    """A network that starts near zero leaves it exponentially, and its loss falls meanwhile."""
    history = calm(40)
    for step in range(60):
        history.run(1, parameter_max_abs=0.8 * 1.2**step, activation_max_abs=5.0 * 1.2**step, loss=2.0 * 0.97**step)

    assert history.kinds == []


def test_norm_and_loss_that_rise_together_are_growth():
    history = calm(40)
    for step in range(120):
        history.run(1, gradient_norm=1.03**step, loss=2.0 * 1.01**step)

    growth = history.of(FindingKind.GRADIENT_GROWTH)
    assert [finding.severity for finding in growth[:2]] == [Severity.INFO, Severity.WARNING]
    assert growth[1].ratio == pytest.approx(3.0, rel=0.1)
    assert growth[1].step > growth[0].step


def test_growth_is_not_told_from_the_first_readings_after_warm_up():
    history = calm(10)
    history.run(12, gradient_norm=5.0, loss=5.0)

    assert only(history, FindingKind.GRADIENT_GROWTH).step == 20


def test_growth_below_twice_the_usual_is_none_yet():
    history = calm(40)
    for step in range(25):
        history.run(1, gradient_norm=1.02**step, loss=2.0 * 1.01**step)

    assert history.kinds == []


def test_a_norm_that_rises_while_the_loss_falls_is_no_growth():
    history = calm(40)
    for step in range(100):
        history.run(1, gradient_norm=1.03**step, loss=2.0 * 0.98**step)

    assert history.kinds == []


def test_activations_that_stay_ten_times_larger_are_growth():
    history = calm(40)
    history.run(2, activation_max_abs=80.0, layers={"middle": {"activation_max_abs": 80.0}})

    growth = only(history, FindingKind.ACTIVATION_GROWTH)
    assert (growth.severity, growth.step, growth.layer) == (Severity.WARNING, 42, "middle")


def test_one_large_activation_is_no_growth_yet():
    history = calm(40)
    history.run(1, activation_max_abs=80.0)
    history.run(20)

    assert history.kinds == []


def test_activations_that_grow_tenfold_over_the_whole_run_are_no_growth():
    history = calm(40)
    for step in range(1000):
        history.run(1, activation_max_abs=5.0 * 10 ** (step / 1000))

    assert history.kinds == []


def test_a_value_that_rose_to_within_a_decade_of_its_dtype_is_about_to_overflow():
    history = calm(40)
    report = history.run(
        1, activation_max_abs=9000.0, dtype_max=65504.0, layers={"last": {"activation_max_abs": 9000.0}}
    )

    overflow = history.of(FindingKind.OVERFLOW_IMMINENT)[0]
    assert (overflow.severity, overflow.layer, overflow.quantity) == (
        Severity.CRITICAL,
        "last",
        Quantity.ACTIVATION,
    )
    assert report.overflow_headroom_decades == pytest.approx(math.log10(65504 / 9000))


def test_a_value_more_than_a_decade_below_the_limit_is_not_yet():
    history = calm(40)
    history.run(1, activation_max_abs=6000.0, dtype_max=65504.0)

    assert FindingKind.OVERFLOW_IMMINENT not in history.kinds


def test_activations_that_were_always_large_are_not_about_to_overflow():
    history = History()
    history.run(60, activation_max_abs=9000.0, dtype_max=65504.0)

    assert {finding.step for finding in history.of(FindingKind.OVERFLOW_IMMINENT)} <= set(range(1, 11))


def test_gradients_are_held_to_float32_whatever_the_activations_are():
    history = calm(40)
    history.run(1, gradient_max_abs=60000.0, dtype_max=65504.0)

    assert FindingKind.OVERFLOW_IMMINENT not in history.kinds
    history.run(1, gradient_max_abs=1e38, dtype_max=65504.0)
    assert history.of(FindingKind.OVERFLOW_IMMINENT)[0].quantity is Quantity.GRADIENT


def test_a_layer_with_a_narrower_dtype_of_its_own_is_held_to_that():
    history = calm(40)
    history.run(1, layers={"middle": {"activation_max_abs": 50000.0, "dtype_max": 65504.0}})

    assert history.of(FindingKind.OVERFLOW_IMMINENT)[0].layer == "middle"


def test_a_loss_that_is_not_finite_is_non_finite():
    history = calm(40)
    history.run(1, loss=math.nan)

    finding = only(history, FindingKind.NONFINITE)
    assert (finding.severity, finding.layer, finding.quantity) == (Severity.CRITICAL, "loss", Quantity.LOSS)


def test_a_large_but_finite_loss_is_not_non_finite():
    history = calm(40)
    history.run(1, loss=1e300)

    assert FindingKind.NONFINITE not in history.kinds


def test_the_gradient_of_a_skipped_update_is_not_non_finite():
    history = calm(40)
    history.run(3, applied=False, gradient_norm=math.inf, gradient_max_abs=math.inf, nonfinite={"gradient": 10})

    assert history.kinds == []
    assert set(history.states[10:]) == {"h"}


def test_a_loss_that_is_not_finite_counts_in_a_skipped_step_too():
    history = calm(40)
    history.run(1, applied=False, loss=math.nan)

    assert history.kinds == [FindingKind.NONFINITE]


def test_after_a_value_that_is_not_finite_nothing_else_is_reported_beside_it():
    history = calm(40)
    history.run(5, loss=math.nan, gradient_norm=math.nan, parameter_max_abs=1e38, update_ratio=5.0)

    assert set(history.kinds) == {FindingKind.NONFINITE}


def test_momentum_that_jumps_without_its_gradient_is_an_optimizer_state_jump():
    history = calm(40)
    history.run(1, momentum_max_abs=50.0, layers={"middle": {"momentum_max_abs": 50.0}})

    jump = only(history, FindingKind.OPTIMIZER_STATE_JUMP)
    assert (jump.severity, jump.layer, jump.quantity) == (Severity.WARNING, "middle", Quantity.OPTIMIZER_STATE)


def test_momentum_five_times_its_usual_is_no_jump_yet():
    history = calm(40)
    history.run(1, momentum_max_abs=2.5)

    assert history.kinds == []


def test_momentum_that_follows_a_spiking_gradient_is_no_news():
    history = calm(40)
    history.run(1, gradient_norm=50.0, momentum_max_abs=25.0)

    assert history.kinds == [FindingKind.GRADIENT_SPIKE]


def test_an_update_ten_times_its_usual_is_a_jump():
    history = calm(40)
    history.run(1, update_ratio=0.02)

    assert only(history, FindingKind.UPDATE_JUMP).ratio == pytest.approx(20.0, rel=0.2)


def test_an_update_five_times_its_usual_is_no_jump_yet():
    history = calm(40)
    history.run(1, update_ratio=0.005)

    assert history.kinds == []


def test_updates_that_grow_with_a_warm_up_of_the_rate_do_not_jump():
    history = History()
    for step in range(1, 400):
        history.run(1, learning_rate=step * 1e-5, update_ratio=step * 1e-6)

    assert history.kinds == []


def test_a_loss_thirty_times_its_usual_is_a_spike():
    history = calm(40)
    history.run(1, loss=90.0)

    assert only(history, FindingKind.LOSS_SPIKE).ratio == pytest.approx(45.0, rel=0.2)


def test_a_loss_that_leaps_about_before_a_run_settles_is_no_spike():
    history = History()
    for loss in (0.07, 0.14, 0.6, 2.2, 9.6, 28.0, 40.0, 5.0, 3.0, 2.0):
        history.run(1, loss=loss)
    history.run(30)

    assert history.kinds == []


def test_a_loss_that_stays_three_times_its_usual_is_a_spike_at_the_fifth_step():
    history = calm(40)
    history.run(4, loss=9.0)
    assert history.kinds == []
    history.run(10, loss=9.0)

    assert only(history, FindingKind.LOSS_SPIKE).step == 45


def test_a_loss_that_an_out_of_range_target_explains_is_no_spike():
    history = calm(40)
    history.run(1, loss=90.0, target_max_abs=20.0)

    assert history.kinds == [FindingKind.INPUT_OUT_OF_RANGE]


def test_a_loss_that_changes_its_sign_has_no_usual_size():
    history = History()
    for step in range(100):
        history.run(1, loss=math.sin(step) if step % 7 else 40.0)

    assert history.kinds == []


def skipped(history: History, steps: int, scale: float) -> None:
    for step in range(steps):
        history.run(
            1,
            applied=False,
            gradient_norm=math.inf,
            loss_scale=scale / 2**step,
            layers={layer: {"gradient_norm": math.inf, "gradient_nonfinite": 5.0} for layer in ("first", "middle")},
        )


def test_eight_skipped_updates_in_a_row_are_a_collapse_of_the_scale():
    history = calm(40)
    skipped(history, 8, scale=1024.0)

    collapse = only(history, FindingKind.SCALE_COLLAPSE)
    assert (collapse.severity, collapse.step, collapse.layer) == (Severity.CRITICAL, 48, "middle")
    assert collapse.value == 1024 / 2**7


def test_seven_skipped_updates_are_no_collapse_yet():
    history = calm(40)
    skipped(history, 7, scale=1024.0)

    assert history.kinds == []


def test_skips_at_the_start_find_the_scale_and_are_no_collapse():
    history = History()
    skipped(history, 14, scale=2.0**24)
    history.run(40, loss_scale=2.0**10)

    assert history.kinds == []


def test_a_scale_that_is_gone_before_the_first_update_is_a_collapse():
    history = History()
    skipped(history, 20, scale=2.0**16)

    assert history.of(FindingKind.SCALE_COLLAPSE)[0].step == 18


def test_a_scale_that_falls_with_updates_in_between_is_a_collapse():
    history = History()
    history.run(60, loss_scale=2.0**16)
    for halvings in range(1, 10):
        skipped(history, 1, scale=2.0 ** (16 - halvings))
        history.run(1, loss_scale=2.0 ** (16 - halvings))

    assert FindingKind.SCALE_COLLAPSE in history.kinds


def test_updates_of_exactly_zero_are_stalled():
    history = calm(40)
    history.run(21, update_ratio=0.0)

    assert only(history, FindingKind.STALLED_UPDATES).step == 61


def test_ten_updates_of_zero_are_not_stalled_yet():
    history = calm(40)
    history.run(10, update_ratio=0.0)
    history.run(20)

    assert history.kinds == []


def test_updates_under_a_rate_of_zero_are_not_stalled():
    history = History()
    history.run(40, learning_rate=0.0, update_ratio=0.0)
    history.run(40)
    history.run(60, learning_rate=0.0, update_ratio=0.0)

    assert FindingKind.STALLED_UPDATES not in history.kinds


def test_updates_at_the_end_of_a_schedule_are_not_stalled():
    history = calm(40)
    for step in range(100):
        rate = 0.01 * 0.8**step
        history.run(1, learning_rate=rate, update_ratio=1e-3 * 0.8**step)

    assert FindingKind.STALLED_UPDATES not in history.kinds


def test_updates_of_a_run_that_has_converged_are_not_stalled():
    history = calm(40)
    for step in range(200):
        history.run(1, loss=2.0 * 0.9**step, gradient_norm=0.9**step, update_ratio=1e-3 * 0.9**step)

    assert FindingKind.STALLED_UPDATES not in history.kinds


def test_a_rate_that_was_cut_a_thousandfold_at_once_stalls_the_run():
    history = calm(40)
    history.run(25, learning_rate=1e-6, update_ratio=1e-7)

    assert history.kinds == [FindingKind.LEARNING_RATE_JUMP, FindingKind.STALLED_UPDATES]


def test_frozen_parameters_without_a_gradient_are_not_stalled():
    history = History()
    history.run(80, gradient_norm=None, update_ratio=0.0, layers={layer: {"gradient_norm": None} for layer in LAYERS})

    assert history.kinds == []


def zero_gradients(*layers: str) -> dict[str, dict[str, float | None]]:
    return {layer: {"gradient_norm": 0.0} for layer in layers}


def test_a_layer_without_gradient_for_ten_steps_is_dead():
    history = calm(40)
    history.run(12, layers=zero_gradients("first", "middle"))

    dead = only(history, FindingKind.DEAD_LAYER)
    assert (dead.severity, dead.step, dead.layer, dead.value) == (Severity.WARNING, 50, "first", 0.0)


def test_nine_steps_without_gradient_are_not_dead_yet():
    history = calm(40)
    history.run(9, layers=zero_gradients("first"))
    history.run(20)

    assert history.kinds == []


def test_a_frozen_layer_has_no_gradient_and_is_not_dead():
    history = History()
    history.run(60, layers={"first": {"gradient_norm": None}})

    assert history.kinds == []


def test_a_branch_that_the_loss_never_used_is_not_dead():
    history = History()
    history.run(200, layers=zero_gradients("middle"))

    assert history.kinds == []


def test_a_branch_that_is_not_used_for_a_while_is_dead_only_in_the_long_run():
    history = calm(40)
    history.run(99, layers=zero_gradients("middle"))
    assert history.kinds == []
    history.run(1, layers=zero_gradients("middle"))

    assert only(history, FindingKind.DEAD_LAYER).layer == "middle"


def test_a_branch_whose_activations_are_all_zero_is_dead_at_once():
    history = calm(40)
    history.run(10, layers={"middle": {"gradient_norm": 0.0, "activation_zero_ratio": 1.0}})

    assert only(history, FindingKind.DEAD_LAYER).layer == "middle"


def test_a_run_with_nothing_left_to_learn_has_no_dead_layers():
    history = calm(40)
    history.run(60, loss=0.0, gradient_norm=0.0, gradient_max_abs=0.0, layers=zero_gradients(*LAYERS))

    assert history.kinds == []


def starved(first: float) -> dict[str, dict[str, float | None]]:
    return {"first": {"gradient_norm": first}, "middle": {"gradient_norm": math.sqrt(first)}}


def test_a_first_layer_that_receives_next_to_nothing_is_starved():
    history = History()
    history.run(25, layers=starved(1e-10))

    vanishing = only(history, FindingKind.VANISHING_GRADIENT)
    assert (vanishing.severity, vanishing.step, vanishing.layer) == (Severity.WARNING, 20, "first")
    assert vanishing.ratio == pytest.approx(1e-10, rel=1.0)


def test_a_first_layer_is_not_starved_after_a_few_steps():
    history = History()
    history.run(19, layers=starved(1e-10))

    assert history.kinds == []


def test_norms_that_differ_by_three_decades_are_a_matter_of_architecture():
    history = History()
    history.run(60, layers=starved(1e-3))

    assert history.kinds == []


def test_a_first_layer_with_little_gradient_is_not_starved_while_the_loss_falls():
    history = History()
    for step in range(60):
        history.run(1, loss=2.0 * 0.9**step, layers=starved(1e-6))

    assert history.kinds == []


def test_a_later_layer_with_little_gradient_does_not_vanish():
    """Scales that begin near zero, as in deep residual networks, starve their branch alone."""
    history = History()
    history.run(60, layers={"middle": {"gradient_norm": 1e-9}})

    assert history.kinds == []


def test_a_layer_whose_forward_did_not_run_is_not_taken_for_the_first():
    history = History()
    history.run(60, layers={"middle": {"gradient_norm": 1e-9, "execution_order": None}})

    assert history.kinds == []


def swing(history: History, steps: int, *, loss: float = 3.0, update: float = 0.03, falls: float = 1.0) -> None:
    for step in range(steps):
        history.run(1, loss=loss * falls**step * (1.5 if step % 2 else 0.7), update_ratio=update)


def test_large_updates_under_a_loss_that_swings_for_long_are_an_oscillation():
    history = History()
    swing(history, 80)

    assert only(history, FindingKind.OSCILLATION).severity is Severity.WARNING


def test_a_loss_that_swings_for_fifty_steps_is_no_oscillation_yet():
    history = History()
    swing(history, 50)

    assert history.kinds == []


def test_a_noisy_loss_under_small_updates_is_no_oscillation():
    history = History()
    swing(history, 200, update=0.005)

    assert history.kinds == []


def test_a_loss_that_swings_and_falls_is_no_oscillation():
    history = History()
    swing(history, 200, falls=0.99)

    assert history.kinds == []


def test_input_that_is_not_finite_is_a_warning_of_its_own():
    history = calm(40)
    report = history.run(1, nonfinite={"input": 3})

    finding = only(history, FindingKind.INPUT_NONFINITE)
    assert (finding.severity, finding.value) == (Severity.WARNING, 3)
    assert report.first_nonfinite is None


def test_input_that_is_always_masked_is_not_reported_at_every_step():
    history = History()
    history.run(90, nonfinite={"input": 3})

    assert history.kinds == [FindingKind.INPUT_NONFINITE]


def test_finite_input_is_not_reported_for_a_count_of_zero():
    history = History()
    history.run(20, nonfinite={"input": 0, "activation": 0.0})

    assert history.kinds == []


@pytest.mark.parametrize(
    ("field", "quantity"), [("input_max_abs", Quantity.INPUT), ("target_max_abs", Quantity.TARGET)]
)
def test_a_batch_out_of_range_is_noted(field: str, quantity: Quantity):
    history = calm(40)
    history.run(1, **{field: 40.0})

    finding = only(history, FindingKind.INPUT_OUT_OF_RANGE)
    assert (finding.severity, finding.quantity) == (Severity.INFO, quantity)


def test_a_batch_at_twice_the_usual_range_is_not_out_of_range_yet():
    history = calm(40)
    history.run(1, input_max_abs=6.0)

    assert history.kinds == []


def test_inputs_that_are_not_observed_are_not_out_of_range():
    history = calm(40)
    history.run(1, input_max_abs=40.0)
    history.run(20, input_max_abs=None)

    assert history.kinds == [FindingKind.INPUT_OUT_OF_RANGE]


@pytest.mark.parametrize("rate", [0.05, 0.002])
def test_a_rate_that_jumps_either_way_is_noted(rate: float):
    history = calm(40)
    history.run(1, learning_rate=rate)

    finding = only(history, FindingKind.LEARNING_RATE_JUMP)
    assert (finding.severity, finding.value, finding.baseline) == (Severity.INFO, rate, 0.01)


def test_a_rate_that_doubles_does_not_jump_yet():
    history = calm(40)
    history.run(1, learning_rate=0.02)

    assert history.kinds == []


def test_a_rate_that_comes_up_from_zero_does_not_jump():
    history = History()
    history.run(20, learning_rate=0.0, update_ratio=None)
    history.run(40)

    assert history.kinds == []


# -- lasting conditions, headroom -----------------------------------------------------------------


def test_a_lasting_condition_is_reported_again_only_after_a_hundred_steps():
    history = History()
    history.run(225, layers=starved(1e-10))

    assert [finding.step for finding in history.findings] == [20, 120, 220]


def test_what_follows_from_a_spike_is_not_reported_beside_it():
    history = calm(40)
    history.run(
        3,
        gradient_norm=80.0,
        loss=160.0,
        update_ratio=0.08,
        momentum_max_abs=40.0,
        activation_max_abs=200.0,
    )

    assert set(history.kinds) == {FindingKind.GRADIENT_SPIKE}


def headroom(value: float) -> Headroom:
    return Headroom(
        quantity=Quantity.ACTIVATION,
        series="activation_max_abs",
        value=value,
        decades=38 - math.log10(value),
        layer=None,
    )


def test_steps_to_overflow_extrapolate_steady_growth_linearly():
    forecast = Forecast()
    for step, exponent in enumerate((10, 12, 14), start=1):
        steps = forecast.steps(headroom(10.0**exponent), step)

    assert steps == pytest.approx(12.0)


def test_steps_to_overflow_take_growth_that_doubles_into_account():
    forecast = Forecast()
    for step, exponent in enumerate((4, 5, 7, 11), start=1):
        steps = forecast.steps(headroom(10.0**exponent), step)

    assert steps == pytest.approx(2.1, abs=0.1)


def test_a_value_that_shrinks_does_not_overflow():
    forecast = Forecast()
    forecast.steps(headroom(1e9), 1)

    assert forecast.steps(headroom(1e8), 2) == STEPS_CAP
