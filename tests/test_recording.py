"""The demo as it was recorded, judged again from the file alone: no torch, no training, no clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradexporter.judge import Judge
from gradexporter.records import FindingKind, FirstNonfinite, LayerStats, LayerTable, Quantity, Shape, State, StepReport

RECORDING = Path(__file__).resolve().parent / "data" / "demo_seed1.jsonl"


def number(cell: Any) -> Any:
    """A cell as it was measured: readings that are not finite are words in JSON."""
    return float(cell) if isinstance(cell, str) else cell


def steps() -> list[tuple[StepReport, State]]:
    """Every step as it was measured, and the state that the live run was in."""
    recorded = []
    for line in RECORDING.read_text().splitlines():
        row = json.loads(line)
        state, columns = State(row.pop("state")), row.pop("layers")
        layers = [
            LayerStats(
                layer=name, **{column: number(columns[column][index]) for column in columns if column != "layer"}
            )
            for index, name in enumerate(columns["layer"])
        ]
        measured = {name: number(cell) for name, cell in row.items()}
        recorded.append((StepReport(**measured, layers=LayerTable.from_rows(layers)), state))
    return recorded


@pytest.fixture(scope="module")
def judged() -> list[StepReport]:
    judge = Judge()
    return [judge(report) for report, _ in steps()]


def test_a_replay_finds_every_step_in_the_state_that_it_had_live(judged: list[StepReport]):
    assert [report.state for report in judged] == [state for _, state in steps()]


def test_the_recorded_run_is_a_cascade_eleven_steps_before_it_is_not_finite(judged: list[StepReport]):
    firsts: dict[State | None, int] = {}
    for report in judged:
        firsts.setdefault(report.state, report.step)

    assert firsts == {State.WARMING_UP: 1, State.HEALTHY: 11, State.CASCADE: 48, State.NONFINITE: 59}
    assert judged[-1].first_nonfinite == FirstNonfinite(step=59, layer="6", quantity=Quantity.ACTIVATION)
    assert judged[-1].last_healthy_step == 46
    assert judged[-1].diagnosis is not None
    assert judged[-1].diagnosis.shape is Shape.SPIKE_CASCADE


def test_the_step_that_looks_calm_in_the_middle_is_no_recovery(judged: list[StepReport]):
    calm, hot = judged[52], judged[53]

    assert (calm.step, calm.state) == (53, State.CASCADE)
    assert calm.gradient_norm is not None
    assert hot.gradient_norm is not None
    assert hot.gradient_norm > 50 * calm.gradient_norm


def test_the_cascade_names_the_layer_that_stood_out(judged: list[StepReport]):
    (layer,) = {finding.layer for finding in judged[47].findings if finding.kind is FindingKind.GRADIENT_CASCADE}

    assert layer == "4"


def test_a_replay_saved_and_loaded_in_the_middle_goes_on_healthy_to_the_same_end():
    judge = Judge()
    recorded = [report for report, _ in steps()]
    for report in recorded[:40]:
        judge(report)
    continued = Judge()
    continued.load_state_dict(json.loads(json.dumps(judge.state_dict())))

    states = [continued(report).state for report in recorded[40:]]

    assert State.WARMING_UP not in states
    assert states[-1] is State.NONFINITE
    assert states.index(State.CASCADE) + 41 == 48


def test_the_recording_is_small_and_strict_json():
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = RECORDING.read_text()

    assert len(text) <= 60_000
    for line in text.splitlines():
        json.loads(line, parse_constant=refuse)
