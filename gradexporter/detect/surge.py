"""What is too large: spikes, cascades, growth, overflow, and what is no number any more.

Each rule looks at one step and keeps a few numbers between steps.
"""

from __future__ import annotations

import math

from gradexporter.config import JudgeConfig
from gradexporter.detect.headroom import is_size
from gradexporter.detect.nonfinite import first_nonfinite
from gradexporter.detect.progress import Smooth
from gradexporter.detect.step import BATCH, NEVER, Episode, Step
from gradexporter.records import FLOAT32_MAX, Finding, FindingKind, Quantity, Severity


class Nonfinite:
    """Loss, activation, parameter or optimizer state that is not finite, or an applied gradient."""

    def __call__(self, step: Step) -> Finding | None:
        first = first_nonfinite(step.report, step.nonfinite)
        if first is None:
            return None
        return step.finding(FindingKind.NONFINITE, first.quantity, layer=first.layer)


class OverflowImminent:
    """A value within a decade of its dtype's maximum that rose there, or within a factor of two of it.

    Or a gradient whose norm is within a decade of what has a square in float32: clipping and second moments take it.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config

    def __call__(self, step: Step) -> Finding | None:
        near = [
            headroom
            for headroom in step.headrooms
            if headroom.decades < self._config.overflow_decades
            and (
                headroom.decades < math.log10(2)
                or headroom.series not in _WITH_BASELINE
                or not step.deviation(headroom.series) <= self._config.overflow_rise_decades
            )
        ]
        if not near:
            return self._square(step)
        worst = min(near, key=lambda headroom: headroom.decades)
        baseline = step.baselines.usual(worst.series) if worst.series in _WITH_BASELINE and not worst.layer else None
        return step.finding(
            FindingKind.OVERFLOW_IMMINENT,
            worst.quantity,
            layer=worst.layer or step.largest(worst.series),
            value=worst.value,
            baseline=baseline,
        )

    def _square(self, step: Step) -> Finding | None:
        norm, most = step.report.gradient_norm, max(step.report.dtype_max, FLOAT32_MAX)
        if not is_size(norm) or math.log10(norm) < math.log10(most) / 2 - self._config.overflow_decades:
            return None
        layer = step.largest("gradient_norm")
        return step.finding(FindingKind.OVERFLOW_IMMINENT, Quantity.GRADIENT, layer=layer, value=norm)


_WITH_BASELINE = ("activation_max_abs", "momentum_max_abs", "second_moment_max_abs", "parameter_max_abs")


class GradientSpike:
    """The gradient norm above ten times its usual; a single layer's, in a step where the run's is not, is info."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._episode = Episode(config, FindingKind.GRADIENT_SPIKE)

    def __call__(self, step: Step) -> Finding | None:
        if step.deviation("gradient_norm") > self._config.spike_decades:
            return step.found(FindingKind.GRADIENT_SPIKE, "gradient_norm", layer=step.oddest("gradient_norm"))
        deviation = step.layer_deviation("gradient_norm")
        odd = deviation is not None and bool((deviation > self._config.spike_decades).any())
        if not self._episode.reports(step, odd):
            return None
        layer = step.oddest("gradient_norm")
        assert layer is not None
        index = step.report.layers.names.index(layer)
        return step.finding(
            FindingKind.GRADIENT_SPIKE,
            Quantity.GRADIENT,
            layer=layer,
            value=float(step.report.layers.columns["gradient_norm"][0][index]),
            baseline=step.baselines.layer_usual("gradient_norm", index),
            severity=Severity.INFO,
        )


class GradientCascade:
    """A spike that the weights amplify, or weights that run away while the gradient is saturated.

    One batch out of range can throw the largest parameter far in its own step without harm. That is a
    spike still, until the parameter grows past where the batch left it.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._last_spike = self._spike_before = NEVER
        self._surges = (False, False, False)
        self._parameter_read = NEVER
        self._largest = math.nan
        self._growing_since = 0
        self._thrown_to = 0.0

    def __call__(self, step: Step) -> Finding | None:
        config = self._config
        deviation = step.deviation("gradient_norm")
        if deviation > config.spike_decades:
            self._spike_before, self._last_spike = self._last_spike, step.number
        self._surges = (*self._surges[1:], deviation > config.cascade_gradient_decades)
        if step.observed("parameter_max_abs"):
            self._parameter_read = step.number
        grown, runs_away = self._is_grown(step), self._runs_away(step)
        if self._amplified(step, grown):
            return step.found(FindingKind.GRADIENT_CASCADE, "gradient_norm", layer=step.oddest("gradient_norm"))
        if runs_away:
            layer = step.largest("parameter_max_abs")
            return step.found(FindingKind.GRADIENT_CASCADE, "parameter_max_abs", layer=layer)
        return None

    def _amplified(self, step: Step, grown: bool) -> bool:
        config = self._config
        if step.number - self._last_spike >= config.cascade_within_steps:
            return False
        if grown:
            return True
        unseen = step.number - self._parameter_read >= len(self._surges)
        return unseen and sum(self._surges) >= 2

    def _is_grown(self, step: Step) -> bool:
        """The largest parameter is far above its usual, and not merely where the batch of a first spike threw it."""
        value, deviation = step.report.parameter_max_abs, step.baselines.deviation("parameter_max_abs")
        if not deviation > self._config.cascade_parameter_decades:
            self._thrown_to = 0.0
            return False
        if value is None or not step.observed("parameter_max_abs"):
            return not self._thrown_to
        if self._throws(step):
            self._thrown_to = value
        return value > self._thrown_to

    def _throws(self, step: Step) -> bool:
        """A batch out of range sets off a first spike here, and the parameter is not so far that it runs away."""
        config = self._config
        first = step.number == self._last_spike and step.number - self._spike_before >= config.cascade_within_steps
        out_of_range = any(step.deviation(series) > config.input_decades for series in BATCH)
        return first and out_of_range and step.deviation("parameter_max_abs") < config.runaway_parameter_decades

    def _runs_away(self, step: Step) -> bool:
        """The largest parameter is far above its usual, has not stopped growing, and the loss does not fall by it."""
        config, value = self._config, step.report.parameter_max_abs
        deviation = step.deviation("parameter_max_abs")
        if value is not None and math.isfinite(value):
            if not (value > self._largest and deviation > config.cascade_parameter_decades):
                self._growing_since = step.report.step
            self._largest = value
        grown = step.report.step - self._growing_since >= config.runaway_steps
        return grown and not _pays(step, config) and deviation > config.runaway_parameter_decades


def _pays(step: Step, config: JudgeConfig) -> bool:
    """The loss falls, so that what grows meanwhile is the model learning."""
    return step.progress.trend_decades < -config.growth_loss_decades


class GradientGrowth:
    """Norm and loss that rise together without a spike: the slow way to diverge."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._norm = Smooth(config.growth_tau_steps)
        self._readings = 0
        self._running = 0
        self._episodes = {
            severity: Episode(config, FindingKind.GRADIENT_GROWTH) for severity in (Severity.INFO, Severity.WARNING)
        }

    def __call__(self, step: Step) -> Finding | None:
        config, norm = self._config, step.deviation("gradient_norm")
        if math.isnan(norm):
            return None
        self._norm.add(min(norm, 2.0), step.report.step)
        self._readings += 1
        # The first readings alone are no smooth norm, and a warm-up that ended on a crest settles within them.
        rising = self._readings > config.growth_tau_steps and step.progress.trend_decades > config.growth_loss_decades
        self._running = self._running + 1 if rising and self._norm.value > config.growth_decades else 0
        loud = self._norm.value > config.growth_warning_decades
        severity = Severity.WARNING if loud else Severity.INFO
        if not self._episodes[severity].reports(step, self._running >= 2, silent=not step.quiet):
            return None
        usual = step.baselines.usual("gradient_norm") or math.nan
        return step.finding(
            FindingKind.GRADIENT_GROWTH,
            Quantity.GRADIENT,
            layer=step.oddest("gradient_norm"),
            value=usual * 10**self._norm.value,
            baseline=usual,
            severity=severity,
        )


class ActivationGrowth:
    """The largest activation above ten times its usual on two readings running, and a loss that does not fall."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._running = 0
        self._episode = Episode(config, FindingKind.ACTIVATION_GROWTH)

    def __call__(self, step: Step) -> Finding | None:
        if step.observed("activation_max_abs"):
            odd = step.deviation("activation_max_abs") > self._config.activation_growth_decades
            self._running = self._running + 1 if odd else 0
        holds = self._running >= 2 and step.observed("activation_max_abs") and not _pays(step, self._config)
        if not self._episode.reports(step, holds, silent=not step.quiet):
            return None
        layer = step.oddest("activation_max_abs")
        return step.found(FindingKind.ACTIVATION_GROWTH, "activation_max_abs", layer=layer)


class Jump:
    """A reading above ten times its usual and, at once, far above the one before: it did not grow there."""

    def __init__(self, config: JudgeConfig, kind: FindingKind, *series: str) -> None:
        self._config = config
        self._kind = kind
        self._series = series
        self._episode = Episode(config, kind)

    def __call__(self, step: Step) -> Finding | None:
        for series in self._series:
            odd = step.deviation(series) > self._config.jump_decades
            odd = odd and step.baselines.rise(series) > self._config.jump_rise_decades
            if odd and step.quiet:
                fresh = self._episode.reports(step, True)
                return step.found(self._kind, series, layer=step.largest(series)) if fresh else None
        return None


class OptimizerStateLost:
    """An optimizer that starts from nothing, or a second moment from next to nothing, in a run that is continued."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config

    def __call__(self, step: Step) -> Finding | None:
        if step.report.optimizer_state_before == 0:
            usual = step.baselines.usual("momentum_max_abs")
            kind = FindingKind.OPTIMIZER_STATE_JUMP
            return step.finding(kind, Quantity.OPTIMIZER_STATE, value=0.0, baseline=usual)
        lost = step.resumed and step.baselines.rise("second_moment_max_abs") < -self._config.jump_decades
        return step.found(FindingKind.OPTIMIZER_STATE_JUMP, "second_moment_max_abs") if lost else None


class LossSpike:
    """The loss above thirty times its usual, or above three times on five steps running.

    In warm-up it is not known yet what is usual: a loss may well leap about before a run settles.
    A batch that is out of range explains its own loss, as far as the gradient stays calm.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._running = 0
        self._episode = Episode(config, FindingKind.LOSS_SPIKE)

    def __call__(self, step: Step) -> Finding | None:
        config = self._config
        deviation = step.deviation("loss") if step.baselines.is_warm("loss") else math.nan
        if step.observed("loss"):
            self._running = self._running + 1 if deviation > config.loss_rise_decades else 0
        explained = any(finding.kind is FindingKind.INPUT_OUT_OF_RANGE for finding in step.findings)
        odd = (deviation > config.loss_spike_decades and not explained) or self._running >= config.loss_rise_steps
        if not self._episode.reports(step, odd and not step.progress.signed, silent=not step.quiet):
            return None
        return step.found(FindingKind.LOSS_SPIKE, "loss")
