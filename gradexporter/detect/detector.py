"""All rules on one step, and the counters that they keep between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradexporter.config import JudgeConfig
from gradexporter.detect.baseline import Baselines
from gradexporter.detect.headroom import Forecast, Headroom, headrooms
from gradexporter.detect.nonfinite import nonfinite_quantities, producer
from gradexporter.records import (
    Finding,
    FindingKind,
    FirstNonfinite,
    Quantity,
    Severity,
    State,
    StepReport,
    Values,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What the rules say about one step."""

    findings: tuple[Finding, ...]
    state: State | None
    """The worst state that a finding of this step calls for; None in a clean step."""
    warm: bool
    first_nonfinite: FirstNonfinite | None
    gradient_norm_baseline: float | None
    gradient_spike_ratio: float | None
    headroom: float | None
    steps_to_overflow: float | None
    layer_deviation: Values | None


class Detector:
    """Runs every rule on each step of one optimizer, in order."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.baselines = Baselines(config)
        self._forecasts: dict[str, Forecast] = {}
        self._seen = 0
        self._last_spike = -math.inf
        self._surges: list[int] = []

    def __call__(self, report: StepReport) -> Detection:
        baselines, config = self.baselines, self._config
        baselines.observe(report)
        self._seen += 1
        findings: list[Finding] = []
        odd = nonfinite_quantities(report)
        first = self._first_nonfinite(report, odd)
        state = None
        if first is not None:
            state = State.NONFINITE
            findings.append(
                Finding(
                    kind=FindingKind.NONFINITE,
                    severity=Severity.CRITICAL,
                    step=report.step,
                    layer=first.layer,
                    quantity=first.quantity,
                )
            )
        nearest = headrooms(report)
        steps = [
            self._forecasts.setdefault(h.field, Forecast()).steps(h.value, h.decades, report.step) for h in nearest
        ]
        if near := self._overflow(report, nearest):
            findings.append(near)
            state = state or State.CASCADE
        spike = self._spike(report)
        if cascade := self._cascade(report):
            findings.append(cascade)
            state = state or State.CASCADE
        if spike:
            findings.append(spike)
            state = state or State.SPIKE
        ratio = baselines.run_ratio("gradient_norm") if _finite(report.gradient_norm) else None
        return Detection(
            findings=tuple(findings),
            state=state,
            warm=baselines.is_warm("gradient_norm")
            or (report.gradient_norm is None and self._seen > config.warmup_steps),
            first_nonfinite=first,
            gradient_norm_baseline=baselines.run_usual("gradient_norm") if baselines.is_warm("gradient_norm") else None,
            gradient_spike_ratio=ratio,
            headroom=min((h.decades for h in nearest), default=None),
            steps_to_overflow=min(steps, default=None),
            layer_deviation=self._layer_deviation(report),
        )

    def _layer_deviation(self, report: StepReport) -> Values | None:
        column = report.layers.column("gradient_norm")
        if column is None:
            return None
        deviation = self.baselines.layer_deviation("gradient_norm")
        return np.where(column[1] & np.isfinite(column[0]), deviation, np.nan)

    def _first_nonfinite(self, report: StepReport, odd: tuple[Quantity, ...]) -> FirstNonfinite | None:
        fatal = [q for q in odd if q is not Quantity.INPUT]
        if not fatal:
            return None
        quantity = odd[0]
        fallback = quantity.value if quantity in (Quantity.INPUT, Quantity.LOSS) else "unknown"
        return FirstNonfinite(step=report.step, layer=producer(report, quantity) or fallback, quantity=quantity)

    def _culprit(self, report: StepReport) -> str | None:
        deviation = self._layer_deviation(report)
        if deviation is None or np.isnan(deviation).all():
            return None
        return report.layers.names[int(np.nanargmax(deviation))]

    def _spike(self, report: StepReport) -> Finding | None:
        deviation = self.baselines.run_deviation("gradient_norm")
        if not _finite(report.gradient_norm) or deviation is None or deviation <= self._config.spike_decades:
            return None
        self._last_spike = self._seen
        return Finding(
            kind=FindingKind.GRADIENT_SPIKE,
            severity=Severity.WARNING,
            step=report.step,
            layer=self._culprit(report),
            quantity=Quantity.GRADIENT,
            value=report.gradient_norm,
            baseline=self.baselines.run_usual("gradient_norm"),
            ratio=self.baselines.run_ratio("gradient_norm"),
        )

    def _cascade(self, report: StepReport) -> Finding | None:
        config = self._config
        gradient = self.baselines.run_deviation("gradient_norm")
        observed = _finite(report.gradient_norm) and gradient is not None
        self._surges.append(int(observed and gradient > config.cascade_gradient_decades))
        self._surges = self._surges[-3:]
        if self._seen - self._last_spike >= config.cascade_within_steps:
            return None
        if self.baselines.is_seen("parameter_max_abs"):
            parameter = self.baselines.run_deviation("parameter_max_abs")
            holds = parameter is not None and parameter > config.cascade_parameter_decades
        else:
            holds = sum(self._surges) >= 2
        if not holds:
            return None
        return Finding(
            kind=FindingKind.GRADIENT_CASCADE,
            severity=Severity.CRITICAL,
            step=report.step,
            layer=self._culprit(report),
            quantity=Quantity.GRADIENT,
            value=report.gradient_norm,
            baseline=self.baselines.run_usual("gradient_norm"),
            ratio=self.baselines.run_ratio("gradient_norm"),
        )

    def _overflow(self, report: StepReport, nearest: list[Headroom]) -> Finding | None:
        config = self._config
        near = [h for h in nearest if h.decades < config.overflow_decades and self._rising(h)]
        if not near:
            return None
        worst = min(near, key=lambda h: h.decades)
        return Finding(
            kind=FindingKind.OVERFLOW_IMMINENT,
            severity=Severity.CRITICAL,
            step=report.step,
            layer=worst.layer,
            quantity=worst.quantity,
            value=worst.value,
        )

    def _rising(self, headroom: Headroom) -> bool:
        if headroom.decades <= math.log10(2) or headroom.field not in self.baselines.run_names:
            return True
        deviation = self.baselines.run_deviation(headroom.field)
        return deviation is None or deviation > self._config.overflow_rise_decades


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
