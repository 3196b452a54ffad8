"""Records: columns and rows, words, and the plain form that JSON takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gradexporter.records import (
    Diagnosis,
    Finding,
    FindingKind,
    Identity,
    LayerStats,
    LayerTable,
    Quantity,
    Severity,
    Shape,
    Snapshot,
    State,
    StepReport,
    to_plain,
)


def test_a_table_gives_back_the_rows_it_was_made_of() -> None:
    rows = [
        LayerStats(layer="a", gradient_norm=1.0, spike_ratio=2.0),
        LayerStats(layer="b", gradient_norm=math.inf),
        LayerStats(layer="c"),
    ]
    table = LayerTable.from_rows(rows)

    assert list(table.rows()) == rows
    assert len(table) == 3
    assert set(table.columns) == {"gradient_norm", "spike_ratio"}
    assert table.column("activation_rms") is None


def test_setting_a_column_leaves_the_table_it_came_from() -> None:
    table = LayerTable.from_rows([LayerStats(layer="a", gradient_norm=1.0)])
    other = table.with_column("spike_ratio", np.array([3.0]), np.array([True]))

    assert table.column("spike_ratio") is None
    assert list(other.rows()) == [LayerStats(layer="a", gradient_norm=1.0, spike_ratio=3.0)]


def test_a_word_and_its_member_are_one_key() -> None:
    """Reports come with either: from the capture side with members, from a file with words."""
    assert {Quantity.LOSS: 1}["loss"] == 1
    assert {"loss": 1}[Quantity.LOSS] == 1
    assert f"{State.CASCADE}" == "cascade"


def test_states_and_severities_have_an_order() -> None:
    assert [state.code for state in State] == [0, 1, 2, 3, 4]
    assert [severity.code for severity in Severity] == [0, 1, 2]


def test_the_latest_report_and_the_worst_state_are_over_all_optimizers() -> None:
    early = StepReport(step=4, timestamp=1.0, state=State.CASCADE)
    late = StepReport(step=4, timestamp=2.0, state=State.HEALTHY, optimizer=1)
    snapshot = Snapshot(identity=Identity(run_id="r"), reports=(early, late))

    assert snapshot.report is late
    assert snapshot.state is State.CASCADE
    assert Snapshot(identity=Identity(run_id="r")).report is None
    assert Snapshot(identity=Identity(run_id="r"), reports=(StepReport(step=1),)).state is None


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (np.float32(0.5), 0.5),
        (np.float64(math.nan), "NaN"),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        (None, None),
        (State.SPIKE, "spike"),
        ({Quantity.LOSS: (1, math.nan)}, {"loss": [1, "NaN"]}),
        (frozenset({1}), [1]),
    ],
    ids=str,
)
def test_a_value_becomes_what_json_has(value: object, plain: object) -> None:
    assert to_plain(value) == plain
    assert type(to_plain(value)) is type(plain)


def test_a_report_becomes_strict_json_and_keeps_nan_apart_from_not_observed() -> None:
    report = StepReport(
        step=3,
        loss=math.nan,
        gradient_norm=None,
        layers=LayerTable.from_rows([LayerStats(layer="a", gradient_norm=math.inf)]),
        state=State.NONFINITE,
        findings=(Finding(kind=FindingKind.NONFINITE, severity=Severity.CRITICAL, step=3, quantity=Quantity.LOSS),),
        diagnosis=Diagnosis(shape=Shape.BAD_INPUT, severity=Severity.CRITICAL, since_step=2, evidence=("x",)),
    )

    plain = json.loads(json.dumps(to_plain(report), allow_nan=False))

    assert (plain["step"], plain["loss"], plain["gradient_norm"], plain["state"]) == (3, "NaN", None, "nonfinite")
    assert plain["layers"][0]["gradient_norm"] == "+Inf"
    assert plain["layers"][0]["activation_rms"] is None
    assert plain["findings"][0]["kind"] == "nonfinite"
    assert plain["diagnosis"]["evidence"] == ["x"]


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(TypeError, match="no plain form of object"):
        to_plain(object())
