"""What do the findings amount to: the failure shape of a run, on what evidence, and what to do.

A run has at most one diagnosis at a time. An open incident or a lasting condition makes it; the worse
wins, then the later. When neither is left it is kept, as recovered, until enough healthy steps passed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gradexporter.config import JudgeConfig
from gradexporter.detect import Detection, Step
from gradexporter.diagnose.advice import (
    RECOVERED_ADVICE,
    RESUME_ADVICE,
    SURVIVED_ADVICE,
    finding_advice,
    incident_advice,
)
from gradexporter.diagnose.incident import SMALL_DTYPE, Incident
from gradexporter.diagnose.trail import Trail
from gradexporter.diagnose.words import finding_evidence, incident_evidence
from gradexporter.records import Diagnosis, Finding, FindingKind, Severity, Shape, State

_SHAPES = {
    FindingKind.GRADIENT_GROWTH: Shape.EXPLODING_GRADIENT,
    FindingKind.ACTIVATION_GROWTH: Shape.EXPLODING_GRADIENT,
    FindingKind.OPTIMIZER_STATE_JUMP: Shape.SPIKE_CASCADE,
    FindingKind.UPDATE_JUMP: Shape.SPIKE_CASCADE,
    FindingKind.LOSS_SPIKE: Shape.BAD_BATCH,
    FindingKind.LEARNING_RATE_JUMP: Shape.RESUME_MISMATCH,
    FindingKind.SCALE_COLLAPSE: Shape.LOSS_SCALE_COLLAPSE,
    FindingKind.STALLED_UPDATES: Shape.STALLED_UPDATES,
    FindingKind.DEAD_LAYER: Shape.DEAD_OR_VANISHING,
    FindingKind.VANISHING_GRADIENT: Shape.DEAD_OR_VANISHING,
    FindingKind.OSCILLATION: Shape.OSCILLATION,
    FindingKind.INPUT_NONFINITE: Shape.BAD_INPUT,
}
"""Findings that are a diagnosis by themselves; those that move the state make an incident instead."""

_PASSING = (
    FindingKind.GRADIENT_GROWTH,
    FindingKind.ACTIVATION_GROWTH,
    FindingKind.OPTIMIZER_STATE_JUMP,
    FindingKind.UPDATE_JUMP,
    FindingKind.LOSS_SPIKE,
    FindingKind.LEARNING_RATE_JUMP,
)
"""Of these, the ones that are a recovered spike once they are over."""


@dataclass(slots=True)
class _Condition:
    """A finding that stands by itself, for as long as it holds."""

    kind: FindingKind
    diagnosis: Diagnosis
    held: int
    """Count of judged steps at which it held last."""
    clean_step: int | None
    """The last step that was healthy before it began."""


class Diagnoser:
    """Turns the detections of one optimizer's steps, in order, into its current diagnosis."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._trail = Trail(config)
        self._open: tuple[Incident, Diagnosis] | None = None
        self._conditions: dict[FindingKind, _Condition] = {}
        self._past: Diagnosis | None = None
        self._healthy_steps = 0

    def __call__(self, detection: Detection, state: State, last_healthy: int | None) -> Diagnosis | None:
        """The diagnosis after one more step; ``state`` is the one that the step leaves the run in.

        ``last_healthy`` is the last healthy step before this one.
        """
        self._trail.observe(detection)
        self._follow_incident(detection, state, last_healthy)
        self._follow_conditions(detection, last_healthy)
        current = self._current()
        self._healthy_steps = self._healthy_steps + 1 if current is None and state is State.HEALTHY else 0
        if self._healthy_steps >= self._config.forget_steps:
            self._past = None
        return current or self._past

    @property
    def is_wary(self) -> bool:
        """Growth or a jump is under way that an incident, should one follow, began with."""
        return any(kind in self._conditions for kind in _PASSING)

    def _current(self) -> Diagnosis | None:
        holding = [condition.diagnosis for condition in self._conditions.values()]
        if self._open is not None:
            incident, diagnosis = self._open
            # Spikes are what an oscillation is made of.
            explained = incident.state is State.SPIKE and FindingKind.OSCILLATION in self._conditions
            holding += [] if explained else [diagnosis]
        return max(holding, key=lambda diagnosis: (diagnosis.severity.code, diagnosis.since_step), default=None)

    def _follow_incident(self, detection: Detection, state: State, last_healthy: int | None) -> None:
        step = detection.step
        if self._open is not None and state in (State.HEALTHY, State.WARMING_UP):
            incident, diagnosis = self._open
            self._close(diagnosis, step.report.step, incident)
            self._open = None
        if detection.state is None:
            return
        incident = self._open[0] if self._open is not None else self._incident(detection, detection.state, last_healthy)
        incident.add(detection, self._trail, self._config)
        diagnosis = Diagnosis(
            shape=incident.shape,
            severity=incident.severity,
            layer=incident.layer,
            quantity=(incident.nonfinite or incident.opening).quantity,
            since_step=incident.since_step,
            evidence=incident_evidence(incident, self._trail, step),
            advice=incident_advice(incident),
        )
        self._open = incident, diagnosis

    def _incident(self, detection: Detection, state: State, last_healthy: int | None) -> Incident:
        """A new one; where growth or a jump led up to it, it began there."""
        step = detection.step
        led = [condition.diagnosis for condition in self._conditions.values() if condition.kind in _PASSING]
        since = min([step.report.step, *(diagnosis.since_step for diagnosis in led)])
        return Incident(
            number=step.number,
            since_step=since,
            clean_step=_before(since, last_healthy),
            opening=next(finding for finding in detection.findings if finding.severity is not Severity.INFO),
            usual_norm=step.baselines.usual("gradient_norm"),
            resumed=step.resumed,
            lead_in=tuple(sentence for diagnosis in led for sentence in diagnosis.evidence),
            state=state,
        )

    def _follow_conditions(self, detection: Detection, last_healthy: int | None) -> None:
        step = detection.step
        for finding in detection.findings:
            if finding.kind in _SHAPES and finding.severity is not Severity.INFO:
                self._conditions[finding.kind] = self._condition(finding, step, last_healthy)
        for kind, condition in list(self._conditions.items()):
            if kind in step.standing:
                condition.held = step.number
            elif step.number - condition.held >= self._config.clean_steps:
                self._close(condition.diagnosis, step.report.step, condition)
                del self._conditions[kind]

    def _condition(self, finding: Finding, step: Step, last_healthy: int | None) -> _Condition:
        known = self._conditions.get(finding.kind)
        since = max(finding.step - self._lead_in(finding.kind), 1) if known is None else known.diagnosis.since_step
        clean = _before(since, last_healthy) if known is None else known.clean_step
        shape, advice = _SHAPES[finding.kind], finding_advice(finding, clean)
        if finding.kind in _PASSING and step.resumed:
            shape, advice = Shape.RESUME_MISMATCH, RESUME_ADVICE
        elif finding.kind is FindingKind.ACTIVATION_GROWTH and step.report.dtype_max < SMALL_DTYPE:
            shape = Shape.HALF_PRECISION_OVERFLOW
        diagnosis = Diagnosis(
            shape=shape,
            severity=finding.severity,
            layer=finding.layer,
            quantity=finding.quantity,
            since_step=since,
            evidence=(finding_evidence(finding),),
            advice=advice,
        )
        return _Condition(finding.kind, diagnosis, step.number, clean)

    def _lead_in(self, kind: FindingKind) -> int:
        """Steps for which a lasting condition holds before it is found."""
        config = self._config
        return {
            FindingKind.DEAD_LAYER: config.dead_steps - 1,
            FindingKind.VANISHING_GRADIENT: config.vanishing_steps - 1,
            FindingKind.OSCILLATION: config.oscillation_steps,
            FindingKind.STALLED_UPDATES: config.stalled_steps,
            FindingKind.SCALE_COLLAPSE: config.skips_in_a_row - 1,
        }.get(kind, 0)

    def _close(self, diagnosis: Diagnosis, step: int, of: Incident | _Condition) -> None:
        """Keeps a diagnosis that no longer holds; a spike that passed is a recovered one."""
        if self._past is not None and self._past.since_step > diagnosis.since_step:
            return
        passing = of.nonfinite is None if isinstance(of, Incident) else of.kind in _PASSING
        if passing and diagnosis.shape is not Shape.RESUME_MISMATCH:
            diagnosis = dataclasses.replace(diagnosis, shape=Shape.SPIKE_RECOVERED, advice=RECOVERED_ADVICE)
        elif isinstance(of, Incident):
            diagnosis = dataclasses.replace(diagnosis, advice=(*diagnosis.advice[:-1], SURVIVED_ADVICE))
        calm = f"Step {step}: nothing odd for {self._config.clean_steps} steps."
        self._past = dataclasses.replace(diagnosis, severity=Severity.INFO, evidence=(*diagnosis.evidence, calm))


def _before(since_step: int, last_healthy: int | None) -> int | None:
    """The last healthy step that came before trouble began."""
    return None if last_healthy is None or since_step <= 1 else min(last_healthy, since_step - 1)
