"""What may have caused trouble: a batch that is not finite or out of range, a learning rate that jumped."""

from __future__ import annotations

import math
from typing import Any

from gradexporter.config import JudgeConfig
from gradexporter.detect.step import BATCH, Episode, Step
from gradexporter.records import Finding, FindingKind, Quantity, Severity


class InputNonfinite:
    """NaN or Inf in what the model is fed, whether or not the model masks it."""

    def __init__(self, config: JudgeConfig) -> None:
        self._episode = Episode(config, FindingKind.INPUT_NONFINITE)

    def __call__(self, step: Step) -> Finding | None:
        holds = Quantity.INPUT in step.nonfinite
        if not self._episode.reports(step, holds):
            return None
        count = step.report.nonfinite.get(Quantity.INPUT.value)
        return step.finding(FindingKind.INPUT_NONFINITE, Quantity.INPUT, value=count)


class InputOutOfRange:
    """A batch whose inputs or targets are above three times their usual range."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config

    def __call__(self, step: Step) -> Finding | None:
        odd = [series for series in BATCH if step.deviation(series) > self._config.input_decades]
        if not odd:
            return None
        return step.found(FindingKind.INPUT_OUT_OF_RANGE, max(odd, key=step.deviation))


class LearningRateJump:
    """A learning rate three times up or down from one step to the next; one up across a restart is a warning."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._last: float | None = None
        self._is_saved = False

    def __call__(self, step: Step) -> Finding | None:
        rate = step.report.learning_rate
        if rate is None or not 0 < rate < math.inf:
            return None
        last, self._last = self._last, rate
        across, self._is_saved = self._is_saved and step.resumed, False
        if last is None or abs(math.log10(rate) - math.log10(last)) < self._config.learning_rate_jump_decades:
            return None
        # A lower rate is what one restarts with after a failure, and a schedule that warms up again begins low.
        severity = Severity.WARNING if across and rate > last else None
        kind, quantity = FindingKind.LEARNING_RATE_JUMP, Quantity.LEARNING_RATE
        return step.finding(kind, quantity, value=rate, baseline=last, severity=severity)

    def state_dict(self) -> dict[str, Any]:
        """The rate of the last step."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Holds the next rate against that of the run that is continued."""
        self._last = None if state["last"] is None else float(state["last"])
        self._is_saved = True
