"""What do the findings amount to: the failure shape of a run, on what evidence, and what to do.

A run has at most one diagnosis at a time. An open incident or a lasting condition makes it; the worse
wins, then the later. When neither is left it is kept, as recovered, until enough healthy steps passed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gradexporter.config import JudgeConfig
from gradexporter.detect import Detection, Step
from gradexporter.diagnose.advice import RECOVERED_ADVICE, finding_advice, incident_advice
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
)
"""Of these, the ones that are a recovered spike once they are over."""


@dataclass(slots=True)
class _Condition:
    """A finding that stands by itself, for as long as it holds."""

    kind: FindingKind
    diagnosis: Diagnosis
    held: int
    """Count of judged steps at which it held last."""


class Diagnoser:
    """Turns the detections of one optimizer's steps, in order, into its current diagnosis."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._trail = Trail(config)
        self._incident: Incident | None = None
        self._incident_diagnosis: Diagnosis | None = None
        self._conditions: dict[FindingKind, _Condition] = {}
        self._past: Diagnosis | None = None
        self._healthy_steps = 0
        self.resumed = False
        """The run goes on from a saved state."""

    def __call__(self, detection: Detection, state: State, last_healthy: int | None) -> Diagnosis | None:
        """The diagnosis after one more step; ``state`` is the one that the step leaves the run in."""
        self._trail.observe(detection)
        self._follow_incident(detection, state, last_healthy)
        self._follow_conditions(detection, last_healthy)
        current = self._current()
        self._healthy_steps = self._healthy_steps + 1 if current is None and state is State.HEALTHY else 0
        if self._healthy_steps >= self._config.forget_steps:
            self._past = None
        return current or self._past

    def _current(self) -> Diagnosis | None:
        open_ = [condition.diagnosis for condition in self._conditions.values()]
        incident = self._incident
        # Spikes are what an oscillation is made of.
        explained = FindingKind.OSCILLATION in self._conditions and incident is not None
        if self._incident_diagnosis is not None and not (
            explained and incident is not None and incident.state is State.SPIKE
        ):
            open_.append(self._incident_diagnosis)
        return max(open_, key=lambda diagnosis: (diagnosis.severity.code, diagnosis.since_step), default=None)

    def _follow_incident(self, detection: Detection, state: State, last_healthy: int | None) -> None:
        step = detection.step
        if self._incident is not None and detection.state is None and state in (State.HEALTHY, State.WARMING_UP):
            assert self._incident_diagnosis is not None
            passing = self._incident.nonfinite is None
            self._close(self._incident_diagnosis, passing, step.report.step)
            self._incident = self._incident_diagnosis = None
        if detection.state is None:
            return
        if self._incident is None:
            opening = next(finding for finding in detection.findings if finding.severity is not Severity.INFO)
            self._incident = Incident(
                number=step.number,
                since_step=self._onset(step),
                opening=opening,
                resumed=self._is_resumed(step),
                state=detection.state,
            )
        incident = self._incident
        incident.add(detection, self._trail, self._config)
        self._incident_diagnosis = Diagnosis(
            shape=incident.shape,
            severity=incident.severity,
            layer=incident.layer,
            quantity=(incident.nonfinite or incident.opening).quantity,
            since_step=incident.since_step,
            evidence=incident_evidence(incident, self._trail, step),
            advice=incident_advice(incident, last_healthy, step.baselines.usual("gradient_norm")),
        )

    def _onset(self, step: Step) -> int:
        """Where growth or a jump led up to this step, an incident began there."""
        before = [
            condition.diagnosis.since_step
            for condition in self._conditions.values()
            if condition.kind in _PASSING and step.number - condition.held <= self._config.clean_steps
        ]
        return min([step.report.step, *before])

    def _is_resumed(self, step: Step) -> bool:
        return self.resumed and step.number <= self._config.resume_steps

    def _follow_conditions(self, detection: Detection, last_healthy: int | None) -> None:
        step = detection.step
        for finding in detection.findings:
            if finding.kind in _SHAPES and finding.severity is not Severity.INFO:
                known = self._conditions.get(finding.kind)
                diagnosis = self._of_finding(finding, step, last_healthy)
                if known is not None:
                    diagnosis = dataclasses.replace(diagnosis, since_step=known.diagnosis.since_step)
                self._conditions[finding.kind] = _Condition(finding.kind, diagnosis, step.number)
        for kind, condition in list(self._conditions.items()):
            if kind in step.standing:
                condition.held = step.number
            elif step.number - condition.held >= self._config.clean_steps:
                self._close(condition.diagnosis, kind in _PASSING, step.report.step)
                del self._conditions[kind]

    def _of_finding(self, finding: Finding, step: Step, last_healthy: int | None) -> Diagnosis:
        shape = _SHAPES[finding.kind]
        if finding.kind in _PASSING and self._is_resumed(step):
            shape = Shape.RESUME_MISMATCH
        elif finding.kind is FindingKind.ACTIVATION_GROWTH and step.report.dtype_max < SMALL_DTYPE:
            shape = Shape.HALF_PRECISION_OVERFLOW
        return Diagnosis(
            shape=shape,
            severity=finding.severity,
            layer=finding.layer,
            quantity=finding.quantity,
            since_step=max(finding.step - self._lead_in(finding.kind), 1),
            evidence=(finding_evidence(finding),),
            advice=finding_advice(finding, last_healthy),
        )

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

    def _close(self, diagnosis: Diagnosis, passing: bool, step: int) -> None:
        """Keeps a diagnosis that no longer holds; a spike that passed is a recovered one."""
        if self._past is not None and self._past.since_step > diagnosis.since_step:
            return
        self._past = dataclasses.replace(
            diagnosis,
            shape=Shape.SPIKE_RECOVERED if passing else diagnosis.shape,
            severity=Severity.INFO,
            evidence=(*diagnosis.evidence, f"Step {step}: nothing odd for {self._config.clean_steps} steps."),
            advice=RECOVERED_ADVICE if passing else diagnosis.advice,
        )
