"""Small training runs, each failing or not in its own way, watched from start to end.

``python tests/test_cases.py FOLDER`` prints the table that the tests assert.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gradexporter
from gradexporter.records import Finding, Severity, StepReport

FAULTY = ["c01", "c02", "c07", "c10", "c12", "c15", "c16", "c22"]
BENIGN = ["h01", "h03", "h05", "h08", "h10"]


@dataclass
class Outcome:
    name: str
    truth: dict[str, Any]
    found: list[tuple[int, Finding]]
    """Index of the callable, counted from 0, and the finding that it made."""
    report: StepReport | None
    losses: list[float]
    weights: list[torch.Tensor]

    @property
    def first_alarm(self) -> int | None:
        return next((at for at, finding in self.found if finding.severity is not Severity.INFO), None)

    @property
    def critical(self) -> list[Finding]:
        return [finding for _, finding in self.found if finding.severity is Severity.CRITICAL]

    @property
    def warnings(self) -> int:
        return sum(finding.severity is Severity.WARNING for _, finding in self.found)

    @property
    def culprit(self) -> str | None:
        if self.report is None:
            return None
        first = self.report.first_nonfinite
        if first is not None:
            return first.layer
        return None if self.report.diagnosis is None else self.report.diagnosis.layer

    def row(self) -> str:
        kinds = Counter(str(finding.kind) for _, finding in self.found if finding.severity is not Severity.INFO)
        shape = self.report.diagnosis.shape if self.report and self.report.diagnosis else None
        window = f"[{self.truth['onset_step']}, {self.truth['should_alarm_by']}]"
        return (
            f"{self.name}  {window:12} first alarm {self.first_alarm!s:5} culprit {self.culprit!s:10} "
            f"(is {self.truth['culprit']!s:6}) shape {shape!s:22} warnings {self.warnings} {dict(kinds)}"
        )


def load(folder: Path, name: str) -> ModuleType:
    path = next(folder.glob(f"{name}_*.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(folder: Path, name: str, *, watched: bool = True) -> Outcome:
    torch.set_num_threads(1)
    module = load(folder, name)
    bundle = module.build(seed=0)
    found: list[tuple[int, Finding]] = []
    losses = []
    optimizers = [bundle["optimizer"], *bundle.get("extra_optimizers", ())]
    monitor = (
        gradexporter.watch(bundle["model"], optimizers, scaler=bundle.get("scaler"), serve=False) if watched else None
    )
    seen = 0
    for at, step in enumerate(bundle["steps"]):
        loss = step()
        losses.append(loss)
        if monitor is not None:
            monitor.observe(torch.tensor(loss))
            assert monitor.flush()
            fresh = monitor.findings[seen:]
            seen = len(monitor.findings)
            found += [(at, finding) for finding in fresh]
    weights = [parameter.detach().clone() for parameter in bundle["model"].parameters()]
    report = None
    if monitor is not None:
        report = monitor.report
        snapshot = monitor.snapshot
        assert snapshot is not None
        assert not any(snapshot.itself.failures.values()), snapshot.itself.failures
        monitor.close()
    return Outcome(name, module.TRUTH, found, report, losses, weights)


@pytest.fixture(scope="module")
def outcomes(cases: Path) -> dict[str, Outcome]:
    return {name: play(cases, name) for name in FAULTY + BENIGN}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_run_alarms_within_its_window(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]

    assert outcome.first_alarm is not None
    assert outcome.truth["onset_step"] <= outcome.first_alarm <= outcome.truth["should_alarm_by"], outcome.row()


@pytest.mark.parametrize("name", BENIGN)
def test_a_healthy_run_is_never_critical_and_warns_at_most_three_times(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]

    assert outcome.critical == []
    assert outcome.warnings <= 3, outcome.row()


def test_the_culprit_is_named_in_nearly_every_faulty_run(outcomes: dict[str, Outcome]) -> None:
    right = [name for name in FAULTY if outcomes[name].culprit == outcomes[name].truth["culprit"]]

    assert len(right) >= 7, [outcomes[name].row() for name in FAULTY]


@pytest.mark.parametrize("name", FAULTY + BENIGN)
def test_losses_and_weights_are_those_of_the_unwatched_run(
    cases: Path, outcomes: dict[str, Outcome], name: str
) -> None:
    bare = play(cases, name, watched=False)
    watched = outcomes[name]

    assert list(map(str, bare.losses)) == list(map(str, watched.losses))
    for mine, theirs in zip(watched.weights, bare.weights, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["GRADEXPORTER_CASES"])
    for case in FAULTY + BENIGN:
        print(play(folder, case).row())
