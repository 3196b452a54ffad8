"""Every rule on stories of runs: it fires, not yet, not for its look-alike, and it ends.

The stories go through promtool, the system's and the newer one.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from promtool import NOON, SCRAPE, Bench, Rank

from gradexporter.bundle import rules
from gradexporter.config import AlertConfig
from gradexporter.records import FindingKind, Quantity, Severity, State

MINUTE = 60

NONFINITE = "GradexporterNonfinite"
CASCADE = "GradexporterGradientCascade"
DIED = "GradexporterDiedWhileUnhealthy"
SPIKE = "GradexporterGradientSpike"
FREQUENT = "GradexporterGradientSpikesFrequent"
STALLED = "GradexporterTrainingStalled"

PAGE = {"severity": "critical", "namespace": "ml", "run_id": "run-a", "attempt": "0"}
TICKET = {**PAGE, "severity": "warning"}


@pytest.fixture(scope="session", params=[None, "new"], ids=["system", "new"])
def promtool(request: pytest.FixtureRequest, tool: Callable[..., str]) -> str:
    return tool("promtool", lane=request.param)


@pytest.fixture
def bench(promtool: str, tmp_path: Path) -> Bench:
    return Bench(promtool, (ROOT / "alerts" / "rules.yaml").read_text(), tmp_path)


def spiked(**story) -> Rank:
    """One spike at NOON; healthy again 16 steps later."""
    return Rank(
        **{
            "findings": {FindingKind.GRADIENT_SPIKE: (NOON,)},
            "states": ((NOON, State.SPIKE), (NOON + 30, State.HEALTHY)),
            **story,
        }
    )


def cascading(**story) -> Rank:
    """A spike that reached the parameters at NOON and stays."""
    return Rank(
        **{
            "findings": {FindingKind.GRADIENT_SPIKE: (NOON,), FindingKind.GRADIENT_CASCADE: (NOON,)},
            "states": ((NOON, State.CASCADE),),
            **story,
        }
    )


def lost(**story) -> Rank:
    """A cascade at NOON whose values are NaN one scrape later, at every step."""
    nonfinite = tuple(range(NOON + SCRAPE, NOON + 3600, SCRAPE))
    return Rank(
        **{
            "findings": {
                FindingKind.GRADIENT_SPIKE: (NOON,),
                FindingKind.GRADIENT_CASCADE: (NOON,),
                FindingKind.NONFINITE: nonfinite,
            },
            "states": ((NOON, State.CASCADE), (NOON + SCRAPE, State.NONFINITE)),
            "norm": float("nan"),
            **story,
        }
    )


# -- non-finite -----------------------------------------------------------------------------------


def test_non_finite_fires_with_the_first_scrape_after_it_although_a_cascade_is_open(bench):
    bench.expect(
        [lost()],
        {
            NOON - SCRAPE: {},
            NOON: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + SCRAPE: {NONFINITE: [PAGE], CASCADE: [PAGE], SPIKE: [TICKET]},
        },
    )


def test_non_finite_fires_for_a_single_event_of_a_series_that_was_never_there_before(bench):
    """``increase`` cannot see a series that is born with its event."""
    run = Rank(findings={FindingKind.NONFINITE: (NOON - 7,)}, states=((NOON - 7, State.NONFINITE),))

    bench.expect([run], {NOON - SCRAPE: {}, NOON: {NONFINITE: [PAGE]}})


def test_non_finite_goes_on_for_as_long_as_steps_are_non_finite_and_then_ends(bench):
    last = NOON + 30 * MINUTE
    run = Rank(findings={FindingKind.NONFINITE: tuple(range(NOON, last + 1, SCRAPE))}, norm=float("nan"))

    bench.expect(
        [run],
        {
            NOON + 29 * MINUTE: {NONFINITE: [PAGE]},
            last + 11 * MINUTE: {NONFINITE: [PAGE]},
            last + 13 * MINUTE: {},
        },
    )


def test_a_non_finite_gradient_of_a_skipped_update_is_no_alert(bench):
    """How a loss scaler finds its scale: the norm reads NaN, the judge finds nothing."""
    bench.expect([Rank(norm=float("nan"))], {NOON: {}, NOON + 20 * MINUTE: {}})


def test_non_finite_outlives_a_target_that_died_right_after_one_scrape(bench):
    run = lost(gone=NOON + 2 * SCRAPE, findings={FindingKind.NONFINITE: (NOON + SCRAPE,)})

    bench.expect(
        [run],
        {
            NOON + SCRAPE: {NONFINITE: [PAGE]},
            NOON + 9 * MINUTE: {NONFINITE: [PAGE], DIED: [PAGE]},
            NOON + 14 * MINUTE: {},
        },
    )


def test_four_ranks_are_one_alert(bench):
    """Rank 2 was first, the others saw it a scrape later, one never did."""
    ranks = [
        lost(rank=0, findings={FindingKind.NONFINITE: (NOON + SCRAPE,)}),
        lost(rank=1, findings={FindingKind.NONFINITE: (NOON + SCRAPE,)}),
        lost(rank=2, findings={FindingKind.NONFINITE: (NOON,)}),
        Rank(rank=3),
    ]

    bench.expect(ranks, {NOON: {NONFINITE: [PAGE]}, NOON + 5 * MINUTE: {NONFINITE: [PAGE]}})


def test_the_healthy_run_beside_it_stays_quiet(bench):
    ranks = [
        lost(run_id="run-a"),
        Rank(run_id="run-b"),
        lost(run_id="run-a", namespace="other", findings={FindingKind.NONFINITE: (NOON + SCRAPE,)}),
    ]

    bench.expect(
        ranks,
        {
            NOON + SCRAPE: {
                NONFINITE: [PAGE, {**PAGE, "namespace": "other"}],
                CASCADE: [PAGE],
                SPIKE: [TICKET],
            }
        },
    )


def test_a_restart_that_fails_again_is_an_alert_of_its_own(bench):
    """The first attempt is forgotten by then; the second fails at its first steps."""
    again = NOON + 20 * MINUTE
    first = lost(findings={FindingKind.NONFINITE: (NOON,)}, states=((NOON, State.NONFINITE),), gone=NOON + MINUTE)
    second = Rank(attempt="1", born=again - MINUTE, findings={FindingKind.NONFINITE: (again,)})

    bench.expect(
        [first, second],
        {
            NOON: {NONFINITE: [PAGE]},
            again - SCRAPE: {},
            again: {NONFINITE: [{**PAGE, "attempt": "1"}]},
        },
    )


def test_a_run_with_paging_off_pages_for_nothing(bench):
    """Not even when only one rank says so, and not when its targets are dead."""
    ranks = [
        lost(rank=0, paging=False, gone=NOON + 2 * SCRAPE),
        lost(rank=1, gone=NOON + 2 * SCRAPE),
        lost(rank=2, gone=NOON + 2 * SCRAPE),
    ]

    bench.expect(
        ranks,
        {
            NOON + SCRAPE: {SPIKE: [TICKET]},
            NOON + 5 * MINUTE: {SPIKE: [TICKET]},
            NOON + 9 * MINUTE: {SPIKE: [TICKET]},
            **{NOON + 9 * MINUTE + second: {SPIKE: [TICKET]} for second in range(SCRAPE, 3 * MINUTE, SCRAPE)},
            NOON + 14 * MINUTE: {},
        },
    )


def test_paging_off_for_one_run_leaves_the_other_alone(bench):
    bench.expect(
        [lost(run_id="experiment", paging=False), lost()],
        {
            NOON + SCRAPE: {
                NONFINITE: [PAGE],
                CASCADE: [PAGE],
                SPIKE: [TICKET, {**TICKET, "run_id": "experiment"}],
            }
        },
    )


def test_alerts_carry_the_routing_labels_that_the_run_has(bench):
    labels = {"team": "vision", "project": "atlas", "cost_center": "7"}
    ranks = [lost(rank=rank, labels=labels) for rank in range(4)]
    routed = {"team": "vision", "project": "atlas"}

    bench.expect(
        ranks,
        {
            NOON + SCRAPE: {
                NONFINITE: [{**PAGE, **routed}],
                CASCADE: [{**PAGE, **routed}],
                SPIKE: [{**TICKET, **routed}],
            }
        },
    )


def test_routing_labels_outlive_the_target(bench):
    run = lost(labels={"team": "vision"}, gone=NOON + 2 * SCRAPE, findings={FindingKind.NONFINITE: (NOON + SCRAPE,)})
    page = {**PAGE, "team": "vision"}

    bench.expect([run], {NOON + SCRAPE: {NONFINITE: [page]}, NOON + 9 * MINUTE: {NONFINITE: [page], DIED: [page]}})


def test_ranks_that_disagree_about_their_team_are_still_one_alert(bench):
    """A join would fail the rule, for every run; here the majority wins."""
    ranks = [lost(rank=rank, labels={"team": team}) for rank, team in enumerate(("vision", "speech", "vision"))]

    bench.expect(
        ranks,
        {
            NOON + SCRAPE: {
                NONFINITE: [{**PAGE, "team": "vision"}],
                CASCADE: [{**PAGE, "team": "vision"}],
                SPIKE: [{**TICKET, "team": "vision"}],
            }
        },
    )


def test_an_alert_needs_no_run_info(bench):
    class Bare(Rank):
        def series(self):
            return [row for row in super().series() if "paging" not in row[1]]

    run = Bare(findings={FindingKind.NONFINITE: (NOON,)})

    bench.expect([run], {NOON: {NONFINITE: [PAGE]}})


# -- cascade --------------------------------------------------------------------------------------


def test_a_cascade_fires_with_its_first_scrape_and_ends_after_the_look_back(bench):
    run = cascading(states=((NOON, State.CASCADE), (NOON + 30, State.HEALTHY)))

    bench.expect(
        [run],
        {
            NOON - SCRAPE: {},
            NOON: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + 9 * MINUTE: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + 11 * MINUTE: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + 13 * MINUTE: {},
        },
    )


def test_a_cascade_between_two_scrapes_is_seen(bench):
    """State and norm look healthy at every scrape; only the event remains."""
    run = Rank(findings={FindingKind.GRADIENT_CASCADE: (NOON - 9,)})

    bench.expect([run], {NOON - SCRAPE: {}, NOON: {CASCADE: [PAGE]}})


def test_a_value_near_overflow_is_a_cascade_too(bench):
    run = Rank(findings={FindingKind.OVERFLOW_IMMINENT: (NOON,)}, states=((NOON, State.CASCADE),))

    bench.expect([run], {NOON - SCRAPE: {}, NOON: {CASCADE: [PAGE]}})


def test_a_spike_alone_is_no_cascade(bench):
    bench.expect([spiked()], {NOON: {SPIKE: [TICKET]}, NOON + 5 * MINUTE: {SPIKE: [TICKET]}})


def test_other_findings_are_for_the_dashboard(bench):
    told = {
        FindingKind.NONFINITE,
        FindingKind.GRADIENT_CASCADE,
        FindingKind.OVERFLOW_IMMINENT,
        FindingKind.GRADIENT_SPIKE,
    }
    run = Rank(findings={kind: tuple(range(NOON - 600, NOON, 30)) for kind in FindingKind if kind not in told})

    bench.expect([run], {NOON - 300: {}, NOON: {}})


def test_a_run_killed_at_cascade_pages_until_the_look_back_ends(bench):
    """The cascade page stays open; that it died fires beside it and is muted by it."""
    run = cascading(gone=NOON + SCRAPE)

    bench.expect(
        [run],
        {
            NOON: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + SCRAPE: {CASCADE: [PAGE], SPIKE: [TICKET]},
            NOON + 2 * MINUTE: {CASCADE: [PAGE], DIED: [PAGE], SPIKE: [TICKET]},
            NOON + 9 * MINUTE: {CASCADE: [PAGE], DIED: [PAGE], SPIKE: [TICKET]},
            NOON + 13 * MINUTE: {},
        },
    )


# -- died while unhealthy -------------------------------------------------------------------------


def test_a_run_that_vanishes_after_a_spike_died_while_unhealthy(bench):
    run = Rank(states=((NOON, State.SPIKE),), gone=NOON + SCRAPE)

    bench.expect(
        [run],
        {
            NOON: {},
            NOON + MINUTE: {},
            NOON + SCRAPE + MINUTE: {DIED: [PAGE]},
            NOON + 9 * MINUTE: {DIED: [PAGE]},
            NOON + 13 * MINUTE: {},
        },
    )


def test_one_failed_scrape_is_no_death(bench):
    run = Rank(states=((NOON, State.SPIKE),), blinks=(NOON + SCRAPE,))

    bench.expect([run], {NOON + second: {} for second in range(0, 3 * MINUTE, SCRAPE)})


def test_a_healthy_run_that_vanishes_is_not_our_business(bench):
    """It spiked earlier and was healthy again; a run that is still warming up likewise."""
    ranks = [
        Rank(states=((NOON - 300, State.SPIKE), (NOON - 60, State.HEALTHY)), gone=NOON),
        Rank(run_id="run-b", states=((0, State.WARMING_UP),), gone=NOON),
    ]

    bench.expect(ranks, {NOON + second: {} for second in range(0, 12 * MINUTE, MINUTE)})


def test_a_run_that_closed_after_a_benign_spike_is_no_death(bench):
    """One scrape of one rank saw that it closed."""
    ranks = [
        spiked(rank=0, states=((NOON, State.SPIKE),), ended=(NOON + SCRAPE, "closed"), gone=NOON + 2 * SCRAPE),
        spiked(rank=1, states=((NOON, State.SPIKE),), gone=NOON + SCRAPE),
    ]

    bench.expect(ranks, {NOON + 2 * MINUTE: {SPIKE: [TICKET]}, NOON + 9 * MINUTE: {SPIKE: [TICKET]}})


@pytest.mark.parametrize("reason", ["exception", "signal"])
def test_a_run_that_ended_badly_is_dead_even_while_its_endpoint_is_held(bench, reason):
    run = Rank(states=((NOON, State.SPIKE),), ended=(NOON + SCRAPE, reason))

    bench.expect([run], {NOON + SCRAPE: {}, NOON + SCRAPE + MINUTE: {DIED: [PAGE]}})


def test_a_run_is_not_dead_while_one_rank_lives(bench):
    ranks = [
        Rank(rank=0, states=((NOON, State.SPIKE),), gone=NOON + SCRAPE),
        Rank(rank=1, states=((NOON, State.SPIKE),)),
    ]

    bench.expect(ranks, {NOON + 5 * MINUTE: {}})


def test_an_attempt_that_died_is_told_although_the_next_one_runs(bench):
    ranks = [
        Rank(attempt="0", states=((NOON, State.CASCADE),), gone=NOON + SCRAPE),
        Rank(attempt="1", born=NOON + MINUTE),
    ]

    bench.expect(ranks, {NOON + 2 * MINUTE: {DIED: [PAGE]}})


def test_an_attempt_that_closed_does_not_cover_for_the_next_one(bench):
    ranks = [
        Rank(attempt="0", ended=(NOON, "closed"), gone=NOON + MINUTE),
        Rank(attempt="1", born=NOON + MINUTE, states=((NOON + MINUTE, State.SPIKE),), gone=NOON + 2 * MINUTE),
    ]

    bench.expect(ranks, {NOON + 4 * MINUTE: {DIED: [{**PAGE, "attempt": "1"}]}})


def test_a_dead_run_with_paging_off_pages_nobody(bench):
    run = Rank(states=((NOON, State.CASCADE),), gone=NOON + SCRAPE, paging=False)

    bench.expect([run], {NOON + second: {} for second in range(0, 12 * MINUTE, MINUTE)})


# -- spikes ---------------------------------------------------------------------------------------


def test_a_spike_is_a_ticket_and_ends(bench):
    bench.expect(
        [spiked(rank=rank) for rank in range(4)],
        {
            NOON - SCRAPE: {},
            NOON: {SPIKE: [TICKET]},
            NOON + 11 * MINUTE: {SPIKE: [TICKET]},
            NOON + 13 * MINUTE: {},
        },
    )


def test_a_spike_of_an_experiment_is_still_a_ticket(bench):
    bench.expect([spiked(paging=False)], {NOON: {SPIKE: [TICKET]}})


def test_spikes_in_a_small_share_of_many_steps_are_not_frequent(bench):
    """8 spikes in 18,000 steps is what healthy runs do; the same 8 in 1,800 steps is not."""
    times = {FindingKind.GRADIENT_SPIKE: tuple(range(NOON - 1400, NOON + 1, 200))}
    fast = Rank(run_id="fast", step_seconds=0.1, findings=times)
    slow = Rank(run_id="run-a", step_seconds=1.0, findings=times)

    bench.expect([fast, slow], {NOON: {SPIKE: [{**TICKET, "run_id": "fast"}, TICKET], FREQUENT: [TICKET]}})


def test_one_hard_batch_of_a_slow_run_is_not_frequent(bench):
    """Four steps of a minute each, all within one excursion, are a large share of few steps."""
    times = {FindingKind.GRADIENT_SPIKE: (NOON - 180, NOON - 120, NOON - 60, NOON)}

    bench.expect([Rank(step_seconds=60.0, findings=times)], {NOON: {SPIKE: [TICKET]}})


def test_frequent_spikes_end_with_the_window(bench):
    times = {FindingKind.GRADIENT_SPIKE: tuple(range(NOON - 300, NOON + 1, 30))}
    ranks = [Rank(rank=rank, findings=times) for rank in range(4)]

    bench.expect(
        ranks,
        {
            NOON - 300: {SPIKE: [TICKET]},
            NOON: {SPIKE: [TICKET], FREQUENT: [TICKET]},
            NOON + 20 * MINUTE: {FREQUENT: [TICKET]},
            NOON + 33 * MINUTE: {},
        },
    )


def test_frequent_spikes_of_a_new_attempt_are_measured_by_its_own_steps(bench):
    """The 100,000 steps of the attempt before would hide them."""
    again = NOON - 10 * MINUTE
    ranks = [
        Rank(attempt="0", step_seconds=0.01, gone=again),
        Rank(attempt="1", born=again, findings={FindingKind.GRADIENT_SPIKE: tuple(range(again + 60, again + 400, 30))}),
    ]

    second = {**TICKET, "attempt": "1"}
    bench.expect(ranks, {NOON: {SPIKE: [second], FREQUENT: [second]}})


# -- stalled --------------------------------------------------------------------------------------


def test_a_run_without_a_step_for_ten_minutes_is_stalled(bench):
    ranks = [Rank(rank=rank, stuck=NOON) for rank in range(4)]

    bench.expect(
        ranks,
        {
            NOON + 10 * MINUTE: {},
            NOON + 10 * MINUTE + SCRAPE: {STALLED: [TICKET]},
            NOON + 60 * MINUTE: {STALLED: [TICKET]},
        },
    )


def test_a_run_with_slow_steps_has_twenty_of_them(bench):
    """At a minute a step, ten minutes without one are nothing."""
    run = Rank(step_seconds=60.0, stuck=NOON)

    bench.expect([run], {NOON + 19 * MINUTE: {}, NOON + 20 * MINUTE + SCRAPE: {STALLED: [TICKET]}})


@pytest.mark.parametrize("phase", ["eval", "checkpoint"])
def test_a_long_evaluation_or_checkpoint_is_no_stall(bench, phase):
    """Nor is the first step after it, although the last one is long ago."""
    back = NOON + 60 * MINUTE
    run = Rank(stuck=NOON, phases=((NOON, phase), (back, "train")))

    bench.expect(
        [run],
        {NOON + 30 * MINUTE: {}, back + MINUTE: {}, back + 9 * MINUTE: {}, back + 11 * MINUTE: {STALLED: [TICKET]}},
    )


@pytest.mark.parametrize("reason", ["closed", "exception"])
def test_a_run_that_has_ended_is_not_stalled(bench, reason):
    bench.expect([Rank(stuck=NOON, ended=(NOON, reason))], {NOON + 30 * MINUTE: {}})


def test_a_run_that_is_gone_is_not_stalled(bench):
    bench.expect([Rank(gone=NOON)], {NOON + 11 * MINUTE: {}})


def test_a_stall_ends_with_the_next_step(bench):
    stuck = Rank(rank=0, stuck=NOON)
    resumed = Rank(rank=1, born=NOON + 12 * MINUTE)

    bench.expect(
        [stuck, resumed],
        {NOON + 11 * MINUTE: {STALLED: [TICKET]}, NOON + 13 * MINUTE: {STALLED: [TICKET]}, NOON + 15 * MINUTE: {}},
    )


# -- recording ------------------------------------------------------------------------------------


def test_recorded_series_are_one_a_run(bench):
    names = [recording.name for recording in rules.recordings()]
    ranks = [cascading(rank=0), Rank(rank=1, step_seconds=2.0)]
    attempt = '{namespace="ml", run_id="run-a", attempt="0"}'
    run = '{namespace="ml", run_id="run-a"}'

    for name, labels, value in zip(names, (attempt, run, run), (3, 2, 2), strict=True):
        bench.expect_value(ranks, NOON, name, {name + labels: value})


# -- texts ----------------------------------------------------------------------------------------


def texts(alert: str, summary: str, *sentences: str) -> dict[str, str]:
    return {
        "summary": summary,
        "description": " ".join(sentences),
        "runbook_url": f"https://github.com/gradexporter/gradexporter/blob/main/alerts/runbooks/{alert}.md",
        "dashboard_url": "/d/gradexporter-run?var-namespace=ml&var-run=run-a",
    }


def test_the_non_finite_page_names_the_rank_and_layer_that_were_first(bench):
    ranks = [
        lost(
            rank=rank,
            first_nonfinite=(NOON + SCRAPE, step, layer, quantity),
            diagnosis="spike_cascade",
            last_healthy_step=47,
            last_clean_checkpoint_step=40,
            findings={FindingKind.NONFINITE: (NOON + SCRAPE,)},
        )
        for rank, step, layer, quantity in (
            (0, 60, "loss", Quantity.LOSS),
            (1, 60, "loss", Quantity.LOSS),
            (2, 59, "6", Quantity.ACTIVATION),
            (3, 61, "loss", Quantity.LOSS),
        )
    ]

    bench.expect_text(
        ranks,
        NOON + SCRAPE,
        NONFINITE,
        PAGE,
        texts(
            NONFINITE,
            "Training produces non-finite values.",
            "Run run-a in namespace ml, attempt 0,",
            "has NaN or Inf in a loss, activation, parameter or applied gradient,",
            "last at 1970-01-01 00:40:15 +0000 UTC.",
            "It began at step 59 in the activation of layer 6 on rank 2.",
            "Diagnosis: spike_cascade.",
            "Last healthy step: 47.",
            "Last clean checkpoint: step 40.",
            "First action: stop the run, every further step is wasted.",
        ),
    )


def test_a_page_about_a_loss_names_no_layer(bench):
    rank = Rank(
        first_nonfinite=(NOON, 15, "loss", Quantity.LOSS),
        diagnosis="undefined_operation",
        findings={FindingKind.NONFINITE: (NOON,)},
    )

    bench.expect_text(
        [rank],
        NOON,
        NONFINITE,
        PAGE,
        texts(
            NONFINITE,
            "Training produces non-finite values.",
            "Run run-a in namespace ml, attempt 0,",
            "has NaN or Inf in a loss, activation, parameter or applied gradient,",
            "last at 1970-01-01 00:40:00 +0000 UTC.",
            "It began at step 15 in the loss on rank 0.",
            "Diagnosis: undefined_operation.",
            "No healthy step is known.",
            "No clean checkpoint was reported.",
            "First action: stop the run, every further step is wasted.",
        ),
    )


def test_a_page_says_what_is_not_known(bench):
    bench.expect_text(
        [Rank(findings={FindingKind.NONFINITE: (NOON,)})],
        NOON,
        NONFINITE,
        PAGE,
        texts(
            NONFINITE,
            "Training produces non-finite values.",
            "Run run-a in namespace ml, attempt 0,",
            "has NaN or Inf in a loss, activation, parameter or applied gradient,",
            "last at 1970-01-01 00:40:00 +0000 UTC.",
            "Where it began is not known.",
            "",
            "No healthy step is known.",
            "No clean checkpoint was reported.",
            "First action: stop the run, every further step is wasted.",
        ),
    )


def test_the_cascade_page_names_the_layer_that_spiked_most(bench):
    ranks = [
        cascading(rank=0, layers={"0": 3.0, "4": 21.5}, last_healthy_step=47),
        cascading(rank=1, layers={"4": 20.0, "6": 53.42, "8": float("nan")}, last_healthy_step=46),
    ]

    bench.expect_text(
        ranks,
        NOON,
        CASCADE,
        PAGE,
        texts(
            CASCADE,
            "Training is finite but breaking up: a spike has reached the parameters, or a value nears overflow.",
            "Run run-a in namespace ml, attempt 0, is in a cascade, last at 1970-01-01 00:40:00 +0000 UTC;",
            "without action non-finite values usually follow within steps.",
            "Worst layer: 6 on rank 1, 53.4 times its usual gradient norm.",
            "",
            "Last healthy step: 46.",
            "No clean checkpoint was reported.",
            "First action: stop the run before it writes another checkpoint.",
        ),
    )


def test_a_cascade_between_two_scrapes_blames_no_calm_layer(bench):
    """Every scrape saw layers near their baselines: the largest of them is noise."""
    bench.expect_text(
        [cascading(layers={"4": 1.9, "6": 2.2})],
        NOON,
        CASCADE,
        PAGE,
        texts(
            CASCADE,
            "Training is finite but breaking up: a spike has reached the parameters, or a value nears overflow.",
            "Run run-a in namespace ml, attempt 0, is in a cascade, last at 1970-01-01 00:40:00 +0000 UTC;",
            "without action non-finite values usually follow within steps.",
            "No layer stood out at a scrape.",
            "",
            "No healthy step is known.",
            "No clean checkpoint was reported.",
            "First action: stop the run before it writes another checkpoint.",
        ),
    )


def test_the_page_of_a_dead_run_says_what_it_died_in(bench):
    run = cascading(gone=NOON + SCRAPE, layers={"6": 53.0}, diagnosis="spike_cascade", last_healthy_step=47)

    bench.expect_text(
        [run],
        NOON + 5 * MINUTE,
        DIED,
        PAGE,
        texts(
            DIED,
            "A run ended without being closed while its gradients were unhealthy.",
            "Run run-a in namespace ml, attempt 0, is gone; its last state was cascade, and it did not close normally.",
            "Worst layer: 6 on rank 0, 53 times its usual gradient norm.",
            "Diagnosis: spike_cascade.",
            "Last healthy step: 47.",
            "No clean checkpoint was reported.",
            "First action: read the last lines of its log before it is restarted.",
        ),
    )


def test_the_texts_of_the_tickets(bench):
    times = tuple(range(NOON - 300, NOON + 1, 30))
    spiking = Rank(findings={FindingKind.GRADIENT_SPIKE: times}, layers={"6": 12.0})
    bench.expect_text(
        [spiking],
        NOON,
        SPIKE,
        TICKET,
        texts(
            SPIKE,
            "The gradient norm spiked above its baseline.",
            "Run run-a in namespace ml, attempt 0, had a gradient spike, last at 1970-01-01 00:40:00 +0000 UTC;",
            "most spikes recover by themselves.",
            "Worst layer: 6 on rank 0, 12 times its usual gradient norm.",
            "First action: none if the state is healthy again; else watch the dashboard.",
        ),
    )
    bench.expect_text(
        [spiking],
        NOON,
        FREQUENT,
        TICKET,
        texts(
            FREQUENT,
            "The gradient norm spikes more often than healthy training does.",
            "Run run-a in namespace ml, attempt 0, had a gradient spike in 0.6111% of the steps of the last 30m.",
            "Worst layer: 6 on rank 0, 12 times its usual gradient norm.",
            "First action: lower the learning rate or tighten clipping before a spike turns into a cascade.",
        ),
    )
    bench.expect_text(
        [Rank(stuck=NOON)],
        NOON + 12 * MINUTE,
        STALLED,
        TICKET,
        texts(
            STALLED,
            "Training has stopped making steps although the process is alive.",
            "Run run-a in namespace ml, attempt 0, closed its last step 12m 0s ago,",
            "is in no evaluation or checkpoint phase and has not ended.",
            "Last step: 2400.",
            "First action: dump the stacks of its ranks (py-spy dump) and look for the one that waits alone.",
        ),
    )


# -- the file -------------------------------------------------------------------------------------


def test_the_rule_file_passes_every_lint_of_promtool(promtool):
    command = [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(ROOT / "alerts" / "rules.yaml")]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_what_on_call_needs():
    for alert in rules.alerts(AlertConfig()):
        assert alert.name.startswith("Gradexporter")
        assert alert.severity in (Severity.CRITICAL, Severity.WARNING)
        assert alert.summary.endswith(".")
        assert not any(character.isdigit() or character == "{" for character in alert.summary), alert.summary
        assert alert.description[-1].startswith("First action: ")


def test_no_critical_rule_forgets_the_paging_switch():
    for alert in rules.alerts(AlertConfig()):
        assert ('paging="off"' in alert.expr) == (alert.severity is Severity.CRITICAL)


def test_every_threshold_comes_from_the_settings():
    """Another value for any setting gives another file."""
    default = rules.render(AlertConfig())

    for setting in dataclasses.fields(AlertConfig):
        value = getattr(AlertConfig(), setting.name)
        other = ("squad",) if isinstance(value, tuple) else f"{value}x" if isinstance(value, str) else value * 0.5
        other = int(other) if isinstance(value, int) else other

        assert rules.render(AlertConfig(**{setting.name: other})) != default, setting.name


def test_settings_keep_the_file_valid(tool, tmp_path):
    config = AlertConfig(
        lookback_seconds=90,
        routing_labels=(),
        runbook_url="https://wiki.example.org/runbooks/",
        grafana_url="https://grafana.example.org/",
    )
    path = tmp_path / "rules.yaml"
    path.write_text(rules.render(config))

    subprocess.run([tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(path)], check=True)
    alert = yaml.safe_load(path.read_text())["groups"][0]["rules"][0]
    assert alert["labels"] == {"severity": "critical"}
    assert alert["annotations"]["runbook_url"] == "https://wiki.example.org/runbooks/GradexporterNonfinite.md"
    assert alert["annotations"]["dashboard_url"].startswith("https://grafana.example.org/d/gradexporter-run?")
