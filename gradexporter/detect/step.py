"""One step as the rules see it, and how a rule says what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gradexporter.config import JudgeConfig
from gradexporter.detect.baseline import LARGEST_DECADES, OF_UPDATES, Baselines
from gradexporter.detect.headroom import Headroom, is_size
from gradexporter.detect.progress import Progress
from gradexporter.records import Finding, FindingKind, Quantity, Severity, StepReport, Values

SEVERITY = {
    FindingKind.GRADIENT_CASCADE: Severity.CRITICAL,
    FindingKind.OVERFLOW_IMMINENT: Severity.CRITICAL,
    FindingKind.NONFINITE: Severity.CRITICAL,
    FindingKind.SCALE_COLLAPSE: Severity.CRITICAL,
    FindingKind.LEARNING_RATE_JUMP: Severity.INFO,
    FindingKind.INPUT_OUT_OF_RANGE: Severity.INFO,
}
"""How loud each kind of finding is; what is not named here is a warning."""

QUANTITY = {
    "gradient_norm": Quantity.GRADIENT,
    "gradient_max_abs": Quantity.GRADIENT,
    "activation_max_abs": Quantity.ACTIVATION,
    "momentum_max_abs": Quantity.OPTIMIZER_STATE,
    "second_moment_max_abs": Quantity.OPTIMIZER_STATE,
    "parameter_max_abs": Quantity.PARAMETER,
    "update_ratio": Quantity.UPDATE,
    "loss": Quantity.LOSS,
    "input_max_abs": Quantity.INPUT,
    "target_max_abs": Quantity.TARGET,
    "loss_scale": Quantity.LOSS_SCALE,
    "learning_rate": Quantity.LEARNING_RATE,
}


BATCH = ("input_max_abs", "target_max_abs")
"""Series that tell whether a batch is out of range."""

NEVER = -(10**9)
"""Step number of something that has not happened."""


@dataclass(slots=True)
class Step:
    """A report with the baselines that it was measured against."""

    report: StepReport
    baselines: Baselines
    number: int
    """How many steps have been judged, this one included."""
    headrooms: list[Headroom]
    progress: Progress
    nonfinite: tuple[Quantity, ...]
    """What is not finite, in execution order."""
    resumed: bool
    """The run was continued from a healthy state a few steps ago."""
    quiet: bool = True
    """No finding moved the state within the memory of a baseline: what may merely follow from one can be reported."""
    findings: list[Finding] = field(default_factory=list)
    """What the rules before this one found."""
    standing: set[FindingKind] = field(default_factory=set)
    """Lasting conditions that hold in this step, reported or not."""

    def observed(self, series: str) -> bool:
        """Whether this step has a finite reading above zero of a run-level series, and was not skipped."""
        skipped = self.report.applied is False and series in OF_UPDATES
        return is_size(getattr(self.report, series)) and not skipped

    def deviation(self, series: str) -> float:
        """Decades above the usual of a reading of this step; NaN without one, so that nothing exceeds it."""
        return self.baselines.deviation(series) if self.observed(series) else math.nan

    def found(self, kind: FindingKind, series: str, *, layer: str | None = None) -> Finding:
        """A finding about the reading of a run-level series in this step."""
        value = getattr(self.report, series)
        usual = self.baselines.usual(series)
        return self.finding(kind, QUANTITY[series], layer=layer, value=value, baseline=usual)

    def finding(
        self,
        kind: FindingKind,
        quantity: Quantity,
        *,
        layer: str | None = None,
        value: float | None = None,
        baseline: float | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding about this step, with the ratio that follows from value and baseline."""
        ratio = None
        if value is not None and baseline is not None and baseline > 0 and math.isfinite(value):
            ratio = min(value / baseline, 10.0**LARGEST_DECADES)
        return Finding(
            kind=kind,
            severity=severity or SEVERITY.get(kind, Severity.WARNING),
            step=self.report.step,
            layer=layer,
            quantity=quantity,
            value=value,
            baseline=baseline,
            ratio=ratio,
        )

    def largest(self, column: str) -> str | None:
        """The layer with the largest finite reading of a statistic; None where no layer has one."""
        pair = self.report.layers.column(column)
        return None if pair is None else self._top(np.where(pair[1] & np.isfinite(pair[0]), pair[0], -np.inf))

    def oddest(self, series: str) -> str | None:
        """The layer that is furthest above its own baseline; the largest one while none has a baseline."""
        deviation = self.layer_deviation(series)
        if deviation is None:
            return None
        return self._top(np.where(np.isnan(deviation), -np.inf, deviation)) or self.largest(series)

    def layer_deviation(self, series: str) -> Values | None:
        """Decades above the usual by layer where this step has a finite reading, else NaN."""
        pair = self.report.layers.column(series)
        if pair is None or (self.report.applied is False and series == "gradient_norm"):
            return None
        usable = pair[1] & (pair[0] > 0) & (pair[0] < np.inf)
        return np.where(usable, self.baselines.layer_deviation(series), np.nan)

    def _top(self, values: Values) -> str | None:
        if not len(values):
            return None
        index = int(values.argmax())
        return self.report.layers.names[index] if values[index] > -np.inf else None


def ratio(decades: float) -> float | None:
    """The factor that a deviation stands for; None for one that is not known."""
    return None if math.isnan(decades) else 10.0 ** min(decades, LARGEST_DECADES)


class Rule(Protocol):
    """Called once a step, in order, whether or not the step has what the rule looks at."""

    def __call__(self, step: Step) -> Finding | None: ...


class Episode:
    """Reports a lasting condition when it begins and every ``repeat_steps`` while it lasts.

    It begins anew once it has been over for ``clean_steps``.
    """

    def __init__(self, config: JudgeConfig, kind: FindingKind) -> None:
        self._config = config
        self._kind = kind
        self._held = NEVER
        self._reported = NEVER

    def reports(self, step: Step, holds: bool, *, silent: bool = False) -> bool:
        """Whether to report now that the condition holds or not; a silent one is reported later if it lasts."""
        if not holds:
            return False
        step.standing.add(self._kind)
        if step.number - self._held > self._config.clean_steps:
            self._reported = NEVER
        self._held = step.number
        if silent or step.number - self._reported < self._config.repeat_steps:
            return False
        self._reported = step.number
        return True
