"""How often sampled statistics are taken."""

from __future__ import annotations

from gradexporter.config import Config
from gradexporter.hooks.cadence import ARMED_STEPS, EVERY_STEP_AT_FIRST, Cadence


def spend(cadence: Cadence, share: float, steps: int = 200) -> None:
    """Costs that are ``share`` of a step when everything is measured."""
    for _ in range(steps):
        cadence.spent(1.0, state=share / 2, activation_full=share / 2 + 0.1, activation_sentinel=0.1)


def full_steps(cadence: Cadence, first: int, last: int) -> list[int]:
    return [step for step in range(first, last + 1) if cadence.full("state", step)]


def test_the_first_steps_are_measured_in_full_whatever_it_costs() -> None:
    cadence = Cadence(Config())
    spend(cadence, 5.0)

    assert full_steps(cadence, 1, EVERY_STEP_AT_FIRST) == list(range(1, EVERY_STEP_AT_FIRST + 1))
    assert cadence.every == {"activation": 1, "state": 1}


def test_afterwards_the_budget_decides() -> None:
    for share, every in ((0.01, 1), (0.03, 2), (0.09, 5), (0.15, 10)):
        cadence = Cadence(Config(overhead_budget=0.02))
        spend(cadence, share)

        assert full_steps(cadence, 401, 420) == [step for step in range(401, 421) if (step - 1) % every == 0]
        assert cadence.every["state"] == every
        assert cadence.exceeded is False


def test_a_cost_beyond_the_slowest_cadence_is_said() -> None:
    cadence = Cadence(Config(overhead_budget=0.02))
    spend(cadence, 0.5)

    assert cadence.exceeded is True
    assert len(full_steps(cadence, 401, 420)) == 2


def test_something_odd_arms_the_next_steps_and_no_more() -> None:
    cadence = Cadence(Config())
    spend(cadence, 0.15)
    cadence.arm(500)

    assert full_steps(cadence, 501, 500 + ARMED_STEPS) == list(range(501, 501 + ARMED_STEPS))
    assert cadence.every["state"] == 1
    assert full_steps(cadence, 501 + ARMED_STEPS, 540) == [521, 531]
    assert cadence.every["state"] == 10


def test_a_fixed_cadence_is_kept() -> None:
    cadence = Cadence(Config(state_every=3, activation_every=1))
    spend(cadence, 5.0)
    cadence.arm(500)

    assert full_steps(cadence, 500, 509) == [502, 505, 508]
    assert cadence.every == {"activation": 1, "state": 3}
