"""What findings amount to, since when, and what is said about it."""

from __future__ import annotations

import math

import pytest
from histories import History, calm
from test_detect import skipped, starved, swing, zero_gradients

from gradexporter.config import JudgeConfig
from gradexporter.records import Diagnosis, Quantity, Severity, Shape, StepReport


def diagnosis(history: History) -> Diagnosis:
    found = history.reports[-1].diagnosis
    assert found is not None
    return found


def shape_after(history: History) -> Shape:
    return diagnosis(history).shape


# -- shapes ---------------------------------------------------------------------------------------


def amplify(history: History, steps: int = 6) -> None:
    """A spike whose size, and the weights', grow tenfold a step."""
    for step in range(steps):
        history.run(
            1,
            gradient_norm=30.0 * 10**step,
            loss=20.0 * 10**step,
            parameter_max_abs=3.0 * 3**step,
            layers={"last": {"gradient_norm": 29.0 * 10**step}},
        )


def test_a_spike_that_the_weights_amplify_is_a_spike_cascade():
    history = calm(40)
    amplify(history)
    history.run(1, loss=math.nan, gradient_norm=math.nan, layers={"middle": {"activation_nonfinite": 3.0}})

    found = diagnosis(history)
    assert (found.shape, found.severity) == (Shape.SPIKE_CASCADE, Severity.CRITICAL)
    assert (found.layer, found.quantity) == ("middle", Quantity.ACTIVATION)
    assert found.since_step == 41


def test_a_cascade_names_the_layer_that_spiked_while_all_is_finite():
    history = calm(40)
    amplify(history)

    assert diagnosis(history).layer == "last"


def test_more_than_sixteen_steps_far_above_the_usual_are_an_explosion():
    history = calm(40)
    for step in range(40):
        history.run(1, gradient_norm=40.0 * 1.5**step, parameter_max_abs=3.0 * 1.1**step)

    assert shape_after(history) is Shape.EXPLODING_GRADIENT


def test_a_spike_at_the_end_of_a_slow_rise_is_an_explosion():
    history = calm(40)
    for step in range(400):
        history.run(1, activation_max_abs=5.0 * 1.01**step)
    history.run(2, gradient_norm=40.0, parameter_max_abs=5.0, activation_max_abs=400.0)

    assert shape_after(history) is Shape.EXPLODING_GRADIENT


def test_growth_of_norm_and_loss_is_an_explosion_in_the_making():
    history = calm(40)
    for step in range(120):
        history.run(1, gradient_norm=1.03**step, loss=2.0 * 1.01**step)

    found = diagnosis(history)
    assert (found.shape, found.severity) == (Shape.EXPLODING_GRADIENT, Severity.WARNING)


@pytest.mark.parametrize("field", ["input_max_abs", "target_max_abs"])
def test_a_spike_with_a_batch_out_of_range_is_a_bad_batch(field: str):
    history = calm(40)
    history.run(1, gradient_norm=60.0, **{field: 90.0})
    history.run(1, gradient_norm=40.0, parameter_max_abs=5.0)

    assert shape_after(history) is Shape.BAD_BATCH


def test_a_batch_five_times_larger_only_sets_a_cascade_off():
    history = calm(40)
    history.run(1, gradient_norm=60.0, input_max_abs=15.0)
    history.run(3, gradient_norm=40.0, parameter_max_abs=5.0)

    found = diagnosis(history)
    assert found.shape is Shape.SPIKE_CASCADE
    assert found.evidence[0] == "Step 41: largest input 15, 5 times its usual 3: the batch is out of range."


def test_a_spike_that_subsides_slowly_is_no_explosion():
    history = calm(40)
    for step in range(40):
        history.run(1, gradient_norm=1e5 * 0.85**step, parameter_max_abs=9.0)

    assert shape_after(history) is Shape.SPIKE_CASCADE


def test_a_batch_out_of_range_that_overflows_the_forward_pass_is_a_bad_batch():
    history = calm(40)
    history.run(1, input_max_abs=1e30, nonfinite={"activation": 7}, loss=math.nan)

    assert shape_after(history) is Shape.BAD_BATCH


def test_a_value_that_is_not_finite_out_of_the_blue_is_an_undefined_operation():
    history = calm(40)
    history.run(1, gradient_norm=math.nan, layers={"middle": {"gradient_nonfinite": 3.0}})

    found = diagnosis(history)
    assert (found.shape, found.layer, found.quantity) == (Shape.UNDEFINED_OPERATION, "middle", Quantity.GRADIENT)


def test_an_undefined_operation_begins_with_itself_and_not_with_an_earlier_spike():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    history.run(12)
    history.run(1, loss=math.nan)

    found = diagnosis(history)
    assert (found.shape, found.since_step) == (Shape.UNDEFINED_OPERATION, 54)


@pytest.mark.parametrize("calm_steps", [0, 1])
def test_what_is_not_finite_by_the_second_step_was_so_from_the_start(calm_steps: int):
    history = History()
    if calm_steps:
        history.run(calm_steps)
    history.run(1, loss=math.nan)

    assert shape_after(history) is Shape.NAN_FROM_START


def test_a_run_that_explodes_in_its_first_steps_did_not_begin_with_nan():
    history = History()
    for norm in (1.0, 1e2, 1e8):
        history.run(1, gradient_norm=norm, loss=norm)
    history.run(1, loss=math.nan, gradient_norm=math.nan)

    assert shape_after(history) in (Shape.SPIKE_CASCADE, Shape.EXPLODING_GRADIENT)


def test_input_that_is_not_finite_is_bad_input():
    history = calm(40)
    history.run(1, nonfinite={"input": 2, "activation": 64}, loss=math.nan)

    found = diagnosis(history)
    assert (found.shape, found.severity, found.layer) == (Shape.BAD_INPUT, Severity.CRITICAL, "input")


def test_input_that_the_model_masks_is_bad_input_but_only_a_warning():
    history = calm(40)
    history.run(1, nonfinite={"input": 2})

    found = diagnosis(history)
    assert (found.shape, found.severity) == (Shape.BAD_INPUT, Severity.WARNING)


def test_activations_near_the_end_of_half_precision_are_an_overflow():
    history = calm(40)
    history.run(1, activation_max_abs=50_000.0, dtype_max=65504.0, layers={"last": {"activation_max_abs": 50_000.0}})

    found = diagnosis(history)
    assert (found.shape, found.layer) == (Shape.HALF_PRECISION_OVERFLOW, "last")


def test_activations_that_creep_out_of_half_precision_are_an_overflow():
    history = calm(40)
    for step in range(500):
        history.run(1, activation_max_abs=min(5.0 * 1.018**step, 60_000.0), dtype_max=65504.0)
    history.run(1, activation_max_abs=math.inf, dtype_max=65504.0, loss=math.nan, gradient_norm=math.nan)

    assert shape_after(history) is Shape.HALF_PRECISION_OVERFLOW


def test_updates_that_are_skipped_for_ever_are_a_collapse_of_the_loss_scale():
    history = calm(40)
    skipped(history, 10, scale=1024.0)

    found = diagnosis(history)
    assert (found.shape, found.severity, found.layer) == (Shape.LOSS_SCALE_COLLAPSE, Severity.CRITICAL, "middle")
    assert found.since_step == 41


def test_a_dead_layer_is_named_since_its_gradient_is_zero():
    history = calm(40)
    history.run(15, layers=zero_gradients("first", "middle"))

    found = diagnosis(history)
    assert (found.shape, found.layer, found.since_step) == (Shape.DEAD_OR_VANISHING, "first", 41)


def test_a_starved_first_layer_is_vanishing_from_the_first_step_on():
    history = History()
    history.run(30, layers=starved(1e-9))

    found = diagnosis(history)
    assert (found.shape, found.layer, found.since_step) == (Shape.DEAD_OR_VANISHING, "first", 1)


def test_updates_of_zero_are_stalled():
    history = calm(40)
    history.run(30, update_ratio=0.0)

    assert shape_after(history) is Shape.STALLED_UPDATES


def test_a_loss_that_swings_is_an_oscillation():
    history = History()
    swing(history, 90)

    assert shape_after(history) is Shape.OSCILLATION


def test_a_spike_within_an_oscillation_is_part_of_it():
    history = History()
    swing(history, 90)
    history.run(1, loss=4.0, update_ratio=0.03, gradient_norm=30.0)

    assert shape_after(history) is Shape.OSCILLATION


# -- life of a diagnosis --------------------------------------------------------------------------


def test_a_calm_run_and_mere_notes_have_no_diagnosis():
    history = calm(40)
    history.run(1, learning_rate=0.1, input_max_abs=90.0)
    history.run(1, layers={"middle": {"gradient_norm": 30.0}})

    assert {finding.severity for finding in history.findings} == {Severity.INFO}
    assert history.reports[-1].diagnosis is None


def test_a_diagnosis_is_set_at_the_first_warning_and_worse_once_it_is():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    assert diagnosis(history).severity is Severity.WARNING
    history.run(1, gradient_norm=50.0, parameter_max_abs=4.0)

    found = diagnosis(history)
    assert (found.severity, found.since_step) == (Severity.CRITICAL, 41)


def test_a_spike_is_kept_as_recovered_once_the_run_is_healthy_again():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    history.run(15)
    assert shape_after(history) is Shape.SPIKE_CASCADE
    history.run(1)

    found = diagnosis(history)
    assert (found.shape, found.severity, found.since_step) == (Shape.SPIKE_RECOVERED, Severity.INFO, 41)
    assert found.evidence[-1] == "Step 57: nothing odd for 16 steps."


def test_an_undefined_operation_keeps_its_name_when_the_run_survives_it():
    history = calm(40)
    history.run(1, loss=math.nan, gradient_norm=0.0)
    history.run(30)

    found = diagnosis(history)
    assert (found.shape, found.severity, found.layer) == (Shape.UNDEFINED_OPERATION, Severity.INFO, "loss")
    assert found.advice[-1] == "It passed and the weights stayed finite: no restart is needed."


def test_a_diagnosis_is_cleared_after_a_thousand_healthy_steps():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    history.run(15 + 999)
    assert shape_after(history) is Shape.SPIKE_RECOVERED
    history.run(2)

    assert history.reports[-1].diagnosis is None


def test_a_later_spike_replaces_an_earlier_one():
    history = calm(40)
    history.run(1, gradient_norm=30.0)
    history.run(100)
    history.run(1, gradient_norm=30.0)

    assert diagnosis(history).since_step == 142


def test_a_lesser_trouble_does_not_replace_an_open_cascade():
    history = calm(40)
    amplify(history, steps=2)
    history.run(14, gradient_norm=100.0, parameter_max_abs=9.0, layers=zero_gradients("first"))

    assert shape_after(history) is Shape.SPIKE_CASCADE
    history.run(40, layers=zero_gradients("first"))
    assert shape_after(history) is Shape.DEAD_OR_VANISHING


def test_a_condition_that_is_over_is_kept_as_a_note():
    history = calm(40)
    history.run(15, layers=zero_gradients("first"))
    history.run(20)

    found = diagnosis(history)
    assert (found.shape, found.severity) == (Shape.DEAD_OR_VANISHING, Severity.INFO)


def test_an_incident_that_growth_led_up_to_began_with_it():
    history = calm(40)
    history.run(1, update_ratio=0.05)
    history.run(3)
    history.run(1, gradient_norm=40.0)

    found = diagnosis(history)
    assert found.since_step == 41
    assert found.evidence[0].startswith("Step 41: update as a share of the weights' norm 0.0")


# -- words ----------------------------------------------------------------------------------------


def test_values_beside_a_gradient_are_those_that_were_read():
    history = calm(40)
    history.run(1, gradient_norm=60.0, loss=7.11e18)
    history.run(8, gradient_norm=60.0, loss=None)

    assert any("Beside it: loss 7.11e+18" in sentence for sentence in diagnosis(history).evidence)


def test_the_words_about_a_cascade():
    history = calm(40)
    history.run(1, learning_rate=0.5)
    amplify(history, steps=3)

    found = diagnosis(history)
    assert found.evidence == (
        "Step 41: learning rate 0.5, from 0.01 the step before.",
        "Step 42: gradient norm 30, 28.9 times its usual 1.04; layer last stands out most.",
        "Step 44: gradient norm 3e+03, 2.79e+03 times its usual 1.08; layer last stands out most.",
        "Beside it: loss 2e+03, 930 times its usual; largest parameter 27, 33.1 times its usual.",
    )
    assert found.advice == (
        "Lower the learning rate tenfold or clip the gradient norm at about 1. Leaving out the batch does not help: "
        "the weights amplify any.",
        "Restart from a checkpoint of step 41 or earlier; later ones carry the damage. Start with fresh optimizer "
        "state: the momentum carries the spike.",
    )


def test_the_words_about_an_undefined_operation_tell_where_to_look():
    history = calm(40)
    history.run(1, gradient_norm=math.nan, nonfinite={"parameter": 4}, layers={"middle": {"gradient_nonfinite": 3.0}})

    found = diagnosis(history)
    assert found.evidence == (
        "Step 41: the gradient of layer middle is the first that is not finite; loss and activations were finite, "
        "so a derivative made it.",
    )
    assert found.advice[0].startswith("Look between layer middle and the loss for a derivative that is infinite")
    assert found.advice[-1] == (
        "The weights are lost. Restart from a checkpoint of step 40 or earlier; later ones carry the damage."
    )


def test_a_restart_is_advised_from_before_the_trouble_began():
    """The state stays healthy while a layer is dead, but such a checkpoint is worth nothing."""
    history = calm(40)
    history.run(130, layers=zero_gradients("first"))

    assert history.reports[-1].last_healthy_step == 170
    assert "step 40 or earlier" in diagnosis(history).advice[1]


def test_a_run_that_was_never_healthy_has_no_checkpoint_to_go_back_to():
    history = History()
    history.run(5)
    history.run(1, gradient_norm=60.0, parameter_max_abs=50.0)

    assert "No step before it was healthy" in diagnosis(history).advice[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_norm": 50.0},
        {"gradient_norm": 50.0, "parameter_max_abs": 5.0},
        {"loss": math.nan},
        {"loss": 90.0},
        {"update_ratio": 0.05},
        {"momentum_max_abs": 50.0},
        {"nonfinite": {"input": 1}},
        {"nonfinite": {"input": 1, "activation": 1}},
        {"parameter_max_abs": math.inf},
        {"second_moment_max_abs": math.inf},
        {"gradient_max_abs": 2e38},
    ],
)
def test_every_diagnosis_has_evidence_with_figures_and_something_to_do(changes: dict[str, object]):
    history = calm(40)
    history.run(1, **changes)

    found = diagnosis(history)
    assert found.evidence
    assert found.advice
    for sentence in (*found.evidence, *found.advice):
        assert sentence.endswith(".")
        assert sentence[0].isupper() or sentence.startswith("torch.")
        assert "None" not in sentence
        assert "nan" not in sentence
    assert all(sentence.startswith(("Step 41: ", "Beside it: ")) for sentence in found.evidence)


def test_a_report_without_layers_is_diagnosed_without_a_culprit():
    history = History()
    for step in range(1, 41):
        history.reports.append(history.judge(StepReport(step=step, gradient_norm=1.0, parameter_max_abs=1.0)))
    history.reports.append(history.judge(StepReport(step=41, gradient_norm=80.0, parameter_max_abs=9.0)))

    assert diagnosis(history).layer is None


def test_thresholds_of_a_diagnosis_are_settings():
    history = History(config=JudgeConfig(clean_steps=4, forget_steps=20))
    history.run(40)
    history.run(1, gradient_norm=30.0)
    history.run(4)
    assert shape_after(history) is Shape.SPIKE_RECOVERED
    history.run(20)

    assert history.reports[-1].diagnosis is None
