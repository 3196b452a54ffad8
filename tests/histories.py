"""A made-up run for tests of the judge: calm, with a little noise, but for what a test changes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gradexporter.config import JudgeConfig
from gradexporter.judge import Judge
from gradexporter.records import Finding, FindingKind, LayerStats, LayerTable, StepReport

CALM: dict[str, float] = {
    "loss": 2.0,
    "gradient_norm": 1.0,
    "gradient_max_abs": 0.2,
    "activation_max_abs": 5.0,
    "momentum_max_abs": 0.5,
    "second_moment_max_abs": 0.01,
    "parameter_max_abs": 0.8,
    "parameter_norm": 20.0,
    "update_ratio": 1e-3,
    "input_max_abs": 3.0,
    "target_max_abs": 1.0,
}
"""Readings of a calm step, before noise."""

LAYERS: dict[str, dict[str, float]] = {
    "first": {"gradient_norm": 0.5, "activation_max_abs": 3.0, "parameter_max_abs": 0.8, "execution_order": 0.0},
    "middle": {"gradient_norm": 0.6, "activation_max_abs": 4.0, "parameter_max_abs": 0.5, "execution_order": 1.0},
    "last": {"gradient_norm": 0.6, "activation_max_abs": 5.0, "parameter_max_abs": 0.4, "execution_order": 2.0},
}

_STEADY = ("execution_order", "parameter_max_abs", "input_max_abs", "target_max_abs")


class History:
    """Steps of one run, judged one after the other; a change lasts for the steps that it is given with."""

    def __init__(self, judge: Judge | None = None, *, first_step: int = 1, config: JudgeConfig | None = None) -> None:
        self.judge = judge or Judge(config)
        self.reports: list[StepReport] = []
        self._next = first_step

    def run(self, steps: int, layers: dict[str, dict[str, float | None]] | None = None, **changes: Any) -> StepReport:
        """The last of ``steps`` more steps; None for a field or a layer's statistic is not observed."""
        for _ in range(steps):
            self._judge(layers or {}, changes)
        return self.reports[-1]

    def _judge(self, layers: dict[str, dict[str, float | None]], changes: dict[str, Any]) -> None:
        noise = 1 + 0.2 * math.sin(2.4 * self._next)
        readings: dict[str, Any] = {name: _noisy(name, value, noise) for name, value in CALM.items()}
        rows = []
        for layer, statistics in LAYERS.items():
            noisy: dict[str, Any] = {name: _noisy(name, value, noise) for name, value in statistics.items()}
            rows.append(LayerStats(layer=layer, **{**noisy, **layers.get(layer, {})}))
        report = StepReport(step=self._next, learning_rate=0.01, applied=True, layers=LayerTable.from_rows(rows))
        self.reports.append(self.judge(dataclasses.replace(report, **{**readings, **changes})))
        self._next += 1

    @property
    def states(self) -> str:
        """First letters of the states, a step each."""
        return "".join(report.state.value[0] if report.state else "?" for report in self.reports)

    @property
    def findings(self) -> list[Finding]:
        return [finding for report in self.reports for finding in report.findings]

    @property
    def kinds(self) -> list[FindingKind]:
        """Kinds of all findings in the order in which they came."""
        return [finding.kind for finding in self.findings]

    def of(self, kind: FindingKind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind is kind]


def calm(steps: int, **settings: Any) -> History:
    """A run that was calm for ``steps`` steps."""
    history = History(config=JudgeConfig(**settings))
    history.run(steps)
    return history


def _noisy(name: str, value: float, noise: float) -> float:
    return value if name in _STEADY else value * noise
