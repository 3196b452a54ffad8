"""All rules on one step, loud ones first, and what the rest of the report needs from the baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradexporter.config import JudgeConfig
from gradexporter.detect.baseline import Baselines
from gradexporter.detect.causes import InputNonfinite, InputOutOfRange, LearningRateJump
from gradexporter.detect.headroom import Forecast, headrooms
from gradexporter.detect.nonfinite import first_nonfinite, nonfinite_quantities
from gradexporter.detect.progress import Progress
from gradexporter.detect.step import NEVER, Rule, Step
from gradexporter.detect.stuck import DeadLayer, Oscillation, ScaleCollapse, StalledUpdates, VanishingGradient
from gradexporter.detect.surge import (
    ActivationGrowth,
    GradientCascade,
    GradientGrowth,
    GradientSpike,
    Jump,
    LossSpike,
    Nonfinite,
    OptimizerStateLost,
    OverflowImminent,
)
from gradexporter.records import Finding, FindingKind, FirstNonfinite, Severity, State, StepReport

_STATES = {
    FindingKind.NONFINITE: State.NONFINITE,
    FindingKind.OVERFLOW_IMMINENT: State.CASCADE,
    FindingKind.GRADIENT_CASCADE: State.CASCADE,
    FindingKind.GRADIENT_SPIKE: State.SPIKE,
}
"""Findings that move the state; a single layer's spike, which is info, does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What the rules say about one step."""

    step: Step
    findings: tuple[Finding, ...]
    state: State | None
    """The worst state that a finding of this step calls for; None for a step without one."""
    is_warm: bool
    """The gradient norm has a baseline, or was never observed and the warm-up is over all the same."""
    first_nonfinite: FirstNonfinite | None
    """Where this step first went non-finite."""
    steps_to_overflow: float | None


class Detector:
    """Runs every rule on each step of one optimizer, in order."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.baselines = Baselines(config)
        self.progress = Progress(config.tau_steps)
        self._number = 0
        self._resumed_until = 0.0
        self._rates = LearningRateJump(config)
        self._stalls = StalledUpdates(config)
        self._last_loud = NEVER
        self._last_grave = self._grave_since = NEVER
        self._forecasts: dict[str, Forecast] = {}
        self._loud: tuple[Rule, ...] = (
            Nonfinite(),
            OverflowImminent(config),
            GradientCascade(config),
            GradientSpike(config),
        )
        self._causes: tuple[Rule, ...] = (
            InputNonfinite(config),
            InputOutOfRange(config),
            self._rates,
            ScaleCollapse(config),
        )
        self._quiet: tuple[Rule, ...] = (
            GradientGrowth(config),
            ActivationGrowth(config),
            Jump(config, FindingKind.OPTIMIZER_STATE_JUMP, "momentum_max_abs", "second_moment_max_abs"),
            Jump(config, FindingKind.UPDATE_JUMP, "update_ratio"),
            OptimizerStateLost(config),
            LossSpike(config),
            self._stalls,
            DeadLayer(config),
            VanishingGradient(config),
            Oscillation(config),
        )

    def __call__(self, report: StepReport) -> Detection:
        """The findings of one step."""
        self._number += 1
        if report.optimizer_state_before == 0:
            self.expect_trouble(self._config.tau_steps)
        self.baselines.observe(report, learn=not self._is_lost())
        self.progress.observe(report.loss, report.step)
        step = Step(
            report=report,
            baselines=self.baselines,
            number=self._number,
            headrooms=headrooms(report),
            progress=self.progress,
            nonfinite=nonfinite_quantities(report),
            resumed=self._number <= self._resumed_until,
        )
        self._apply(self._loud, step)
        state = self._state(step.findings)
        if state is State.NONFINITE:
            del step.findings[1:]  # NaN explains them all
        if state is not None:
            self._last_loud = self._number
        if state in (State.CASCADE, State.NONFINITE):
            if self._number - self._last_grave >= self._config.clean_steps:
                self._grave_since = self._number
            self._last_grave = self._number
        step.quiet = self._number - self._last_loud >= self._config.tau_steps
        self._apply(self._causes, step)
        if any(
            one.kind is FindingKind.LEARNING_RATE_JUMP and one.severity is not Severity.INFO for one in step.findings
        ):
            self.expect_trouble(self._config.tau_steps)
        if state is not State.NONFINITE:
            self._apply(self._quiet, step)
        forecasts = [
            self._forecasts.setdefault(headroom.series, Forecast()).steps(headroom, report.step)
            for headroom in step.headrooms
        ]
        return Detection(
            step=step,
            findings=tuple(step.findings),
            state=state,
            is_warm=self._is_warm(),
            first_nonfinite=first_nonfinite(report, step.nonfinite) if state is State.NONFINITE else None,
            steps_to_overflow=min(forecasts, default=None),
        )

    def expect_trouble(self, steps: float) -> None:
        """What is odd in the next steps is the restart's doing: few after a healthy run, more after a mistake."""
        self._resumed_until = self._number + steps

    def _is_lost(self) -> bool:
        """A cascade is under way, so that its steps tell nothing of what is usual.

        One that lasts is how the run is now, and learned like any other level.
        """
        under_way = self._number - self._last_grave <= self._config.clean_steps
        return under_way and self._number - self._grave_since <= self._config.clean_steps

    @staticmethod
    def _apply(rules: tuple[Rule, ...], step: Step) -> None:
        for rule in rules:
            if finding := rule(step):
                step.findings.append(finding)

    @staticmethod
    def _state(findings: list[Finding]) -> State | None:
        states = [_STATES[finding.kind] for finding in findings if finding.severity is not Severity.INFO]
        return max(states, key=lambda state: state.code, default=None)

    def _is_warm(self) -> bool:
        if self.baselines.is_known("gradient_norm"):
            return self.baselines.is_warm("gradient_norm")
        return self._number > self._config.warmup_steps

    def state_dict(self) -> dict[str, Any]:
        """Plain Python: baselines and what the run started from; counters of the last few steps are left out."""
        return {
            "baselines": self.baselines.state_dict(),
            "progress": self.progress.state_dict(),
            "learning_rate": self._rates.state_dict(),
            "schedule": self._stalls.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues a saved run."""
        self.baselines.load_state_dict(state["baselines"])
        self.progress.load_state_dict(state["progress"])
        self._rates.load_state_dict(state["learning_rate"])
        self._stalls.load_state_dict(state["schedule"])
