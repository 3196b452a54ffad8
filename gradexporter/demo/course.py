"""The course of a run: reports go in one by one, and what happened comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradexporter.records import FindingKind, FirstNonfinite, Severity, Shape, State, StepReport

_JUMP = 10.0
"""How many times as large a gradient must become from one step to the next to be called a jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step after which the run was in another state than before it."""

    before: State | None
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A step that looked calm in the middle of a cascade, and the one after it."""

    calm: StepReport
    hot: StepReport

    @property
    def factor(self) -> float:
        """How many times as large the gradient became."""
        return (self.hot.gradient_norm or math.nan) / (self.calm.gradient_norm or math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run amounted to; ``None`` where there is no such step."""

    scenario: str
    seed: int
    steps: int
    """Steps that were run."""
    spike_step: int | None
    """First step in state spike or worse."""
    cascade_step: int | None
    """First step in state cascade or worse."""
    first_nonfinite: FirstNonfinite | None
    shape: Shape | None
    last_healthy_step: int | None

    @property
    def first_nonfinite_step(self) -> int | None:
        """Step of the first non-finite value."""
        return None if self.first_nonfinite is None else self.first_nonfinite.step

    @property
    def lead_steps(self) -> int | None:
        """Steps from the first alarm to the first non-finite value."""
        alarms = [step for step in (self.spike_step, self.cascade_step) if step is not None]
        if self.first_nonfinite is None or not alarms:
            return None
        return self.first_nonfinite.step - min(alarms)

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        place = self.first_nonfinite
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "steps": self.steps,
            "spike_step": self.spike_step,
            "cascade_step": self.cascade_step,
            "first_nonfinite_step": self.first_nonfinite_step,
            "lead_steps": self.lead_steps,
            "first_nonfinite": None if place is None else {"layer": place.layer, "quantity": str(place.quantity)},
            "shape": None if self.shape is None else str(self.shape),
            "last_healthy_step": self.last_healthy_step,
        }


class Course:
    """Follows one run; keeps two numbers a step, and of the reports only those that matter."""

    def __init__(self, scenario: str, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.steps = 0
        self.norms: list[tuple[float, State]] = []
        """Gradient norm and state of every step; NaN where there is no norm."""
        self.turns: list[Turn] = []
        self.last: StepReport | None = None
        self.alarm: StepReport | None = None
        """The report of the first step in state spike or worse."""
        self.jump: Jump | None = None
        """The last jump out of a calm-looking step in state cascade."""
        self._spike_step: int | None = None
        self._cascade_step: int | None = None

    def add(self, report: StepReport) -> None:
        """Takes the judged report of the next step."""
        state = report.state or State.WARMING_UP
        before = self.last
        self.steps += 1
        self.norms.append((math.nan if report.gradient_norm is None else report.gradient_norm, state))
        if before is None or report.state is not before.state:
            self.turns.append(Turn(before=None if before is None else before.state, report=report))
        if self._spike_step is None and state.code >= State.SPIKE.code:
            self._spike_step, self.alarm = report.step, report
        if self._cascade_step is None and state.code >= State.CASCADE.code:
            self._cascade_step = report.step
        if before is not None and before.state is State.CASCADE and _looks_calm(before) and _spikes(report):
            jump = Jump(calm=before, hot=report)
            self.jump = jump if jump.factor >= _JUMP else self.jump
        self.last = report

    @property
    def outcome(self) -> Outcome:
        """What has happened up to now."""
        last = self.last
        diagnosis = None if last is None else last.diagnosis
        return Outcome(
            scenario=self.scenario,
            seed=self.seed,
            steps=self.steps,
            spike_step=self._spike_step,
            cascade_step=self._cascade_step,
            first_nonfinite=None if last is None else last.first_nonfinite,
            shape=None if diagnosis is None else diagnosis.shape,
            last_healthy_step=None if last is None else last.last_healthy_step,
        )


def _looks_calm(report: StepReport) -> bool:
    return report.gradient_norm is not None and math.isfinite(report.gradient_norm) and not _spikes(report)


def _spikes(report: StepReport) -> bool:
    # A spike of a single layer is information and leaves the run calm.
    return any(
        finding.kind is FindingKind.GRADIENT_SPIKE and finding.severity is not Severity.INFO
        for finding in report.findings
    )
