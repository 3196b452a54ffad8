"""Recorded runs through the judge: the demo's step by step, hundreds of small ones, and real logs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus_report
import numpy as np
import pytest

from gradexporter.judge import Judge
from gradexporter.records import FindingKind, Shape, State, StepReport

FAILING = ("0", "1", "2", "6")
"""Seeds of the demo whose run is not finite at its end."""


def traces(corpus: Path) -> dict[str, dict[str, Any]]:
    recorded = json.loads((corpus / "demo_trace.json").read_text())
    names = [corpus_report.FIELDS[column] for column in recorded["columns"]]
    return {
        seed: {**run, "reports": [dict(zip(names, row, strict=True)) for row in run["rows"]]}
        for seed, run in recorded["runs"].items()
    }


def judged(rows: list[dict[str, Any]], every: int = 1) -> list[StepReport]:
    """The reports of a run; what is sampled is seen only every few steps."""
    judge = Judge()
    reports = []
    for step, row in enumerate(rows, start=1):
        seen = dict(row)
        if step % every != 1 % every:
            for name in ("activation_max_abs", "momentum_max_abs", "parameter_max_abs", "update_ratio"):
                seen[name] = None
        reports.append(judge(StepReport(step=step, learning_rate=0.05, **seen)))
    return reports


def first(reports: list[StepReport], *states: State) -> int:
    return next((report.step for report in reports if report.state in states), 0)


def test_the_states_of_the_demo_are_what_they_were(corpus: Path, golden: Callable[[str, str], None]):
    lines = ["seed  states by first letter, a step each, then last healthy step and shape"]
    for seed, run in traces(corpus).items():
        reports = judged(run["reports"])
        last = reports[-1]
        states = "".join(report.state.value[0] for report in reports if report.state)
        lines.append(f"{seed}  {states}  {last.last_healthy_step}  {last.diagnosis and last.diagnosis.shape}")

    golden("demo_states.txt", "\n".join(lines) + "\n")


def test_the_demo_is_seen_eleven_steps_before_it_is_not_finite(corpus: Path):
    reports = judged(traces(corpus)["1"]["reports"])
    last = reports[-1]

    assert first(reports, State.SPIKE, State.CASCADE) == 48
    assert first(reports, State.CASCADE) == 48
    assert first(reports, State.NONFINITE) == 59
    assert last.first_nonfinite is not None
    assert last.first_nonfinite.step == 59
    assert last.last_healthy_step == 46
    assert last.diagnosis is not None
    assert last.diagnosis.shape is Shape.SPIKE_CASCADE


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("seed", FAILING)
def test_every_failing_seed_is_a_cascade_two_steps_before(corpus: Path, seed: str, every: int):
    run = traces(corpus)[seed]
    reports = judged(run["reports"], every)

    assert first(reports, State.NONFINITE) == run["nf"]
    assert 0 < first(reports, State.CASCADE) <= run["nf"] - 2


def test_seeds_that_stay_finite_are_never_called_non_finite(corpus: Path):
    for seed, run in traces(corpus).items():
        if seed not in FAILING:
            assert first(judged(run["reports"]), State.NONFINITE) == 0


def test_recorded_runs_are_warned_of_in_time_and_not_for_nothing(corpus: Path):
    summary = corpus_report.summarize(corpus)
    print(f"\n{summary}")

    assert summary.recall >= 0.97
    assert summary.lead_p10 >= 2
    assert summary.false_per_10000(State.CASCADE, State.NONFINITE) == 0
    assert summary.false_per_10000(State.SPIKE) <= 5
    assert summary.accuracy >= 0.92


# -- real logs ------------------------------------------------------------------------------------


def real_logs(corpus: Path) -> list[tuple[dict[str, str], list[StepReport]]]:
    """Index row and judged steps of each log; a missing figure is not observed, a logged NaN is a reading."""
    arrays = np.load(corpus / "real_public.npz")
    with (corpus / "real_public.tsv").open() as file:
        index = list(csv.DictReader(file, delimiter="\t"))
    logs = []
    for row in index:
        judge = Judge()
        columns = {name: arrays[f"{row['id']}/{name}"] for name in ("step", "loss", "grad_norm", "learning_rate")}
        reports = []
        for step, loss, norm, rate in zip(*columns.values(), strict=True):
            is_reading = math.isfinite(norm) or "grad_norm" in row["nonfinite"]
            report = StepReport(
                step=int(step),
                loss=float(loss) if math.isfinite(loss) else None,
                gradient_norm=float(norm) if is_reading else None,
                learning_rate=float(rate) if math.isfinite(rate) else None,
            )
            reports.append(judge(report))
        logs.append((row, reports))
    return logs


def test_no_healthy_or_noisy_log_reaches_cascade(corpus: Path):
    calm = [(row["id"], reports) for row, reports in real_logs(corpus) if row["label"] in ("healthy", "noisy")]

    assert len(calm) >= 9
    for name, reports in calm:
        assert first(reports, State.CASCADE, State.NONFINITE) == 0, name
        assert {finding.kind for report in reports for finding in report.findings} == set(), name


def test_readings_that_are_not_finite_are_judged_so(corpus: Path):
    seen = 0
    for _, reports in real_logs(corpus):
        for report in reports:
            norm = report.gradient_norm
            kinds = {finding.kind for finding in report.findings}
            odd = norm is not None and not math.isfinite(norm)
            assert (FindingKind.NONFINITE in kinds) == odd
            seen += odd
    assert seen >= 13
