"""What led up to a step: the few facts about the last steps by which failure shapes are told apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradexporter.config import JudgeConfig
from gradexporter.detect import Detection, Step
from gradexporter.detect.headroom import is_size
from gradexporter.records import Finding, FindingKind

_SERIES = ("gradient_norm", "activation_max_abs", "momentum_max_abs")
"""Any of these at ten times its usual makes an excursion; so does a parameter at three times."""


@dataclass(slots=True)
class Excursion:
    """A stretch of steps in which something was far above its usual, with pauses of a few steps at most."""

    number: int
    """Count of judged steps at which it began."""
    last: int
    """The same for its latest odd step."""
    drift_decades: float
    """Decades that a baseline had risen above its low before the excursion began."""
    running: int = 0
    """Steps in a row that are above thirty times the usual ..."""
    longest: int = 0
    """... and the most that there were."""
    decades: float = 0.0
    """How far the furthest value is above its usual now ..."""
    peak_decades: float = 0.0
    """... and at most."""


@dataclass(slots=True)
class Trail:
    """Follows the steps of one optimizer in constant memory."""

    config: JudgeConfig
    number: int = 0
    excursion: Excursion | None = None
    batch: tuple[int, Finding] | None = None
    """The latest batch out of range, behind its count of judged steps."""
    rate: tuple[int, Finding] | None = None
    """The latest jump of the learning rate upwards, likewise."""
    headroom_decades: float = math.inf
    """Smallest headroom of the latest step that was finite."""
    early_decades: float = 0.0
    """Decades that something had risen above its lowest reading while there were no baselines yet."""
    lows: dict[str, float] = field(default_factory=dict)
    early_lows: dict[str, float] = field(default_factory=dict)

    def observe(self, detection: Detection) -> None:
        """Takes one more step in."""
        step = detection.step
        self.number = step.number
        kinds = {finding.kind: finding for finding in detection.findings}
        batch = kinds.get(FindingKind.INPUT_OUT_OF_RANGE)
        known = self.batch_near(step.number)
        if batch is not None and (known is None or (batch.ratio or 0) > (known.ratio or 0)):
            self.batch = (step.number, batch)
        rate = kinds.get(FindingKind.LEARNING_RATE_JUMP)
        if rate is not None and (rate.ratio or 0) > 1:
            self.rate = (step.number, rate)
        if FindingKind.NONFINITE in kinds:
            return
        self.headroom_decades = min((headroom.decades for headroom in step.headrooms), default=math.inf)
        if step.number <= self.config.warmup_steps:
            self._follow_start(step)
        self._follow(step)

    def _follow_start(self, step: Step) -> None:
        for series in (*_SERIES, "loss"):
            value = getattr(step.report, series)
            if is_size(value):
                low = min(self.early_lows.get(series, math.inf), math.log10(value))
                self.early_lows[series] = low
                self.early_decades = max(self.early_decades, math.log10(value) - low)

    def _follow(self, step: Step) -> None:
        drift = self._drift(step)
        deviations = [step.baselines.deviation(series) for series in _SERIES]
        parameter = step.baselines.deviation("parameter_max_abs")
        odd = parameter > self.config.cascade_parameter_decades
        if odd or any(deviation > self.config.spike_decades for deviation in deviations):
            if not self.in_excursion:
                self.excursion = Excursion(number=step.number, last=step.number, drift_decades=drift)
            assert self.excursion is not None
            self.excursion.last = step.number
        if self.excursion is not None:
            self.excursion.decades = max((deviation for deviation in deviations if deviation > 0), default=0.0)
            self.excursion.peak_decades = max(self.excursion.peak_decades, self.excursion.decades)
            far = self.excursion.decades > self.config.excursion_far_decades
            self.excursion.running = self.excursion.running + 1 if far else 0
            self.excursion.longest = max(self.excursion.longest, self.excursion.running)

    def _drift(self, step: Step) -> float:
        """Decades that a baseline stands above its low, which is forgotten over thousands of steps."""
        drifts = [0.0]
        for series in _SERIES:
            if step.baselines.is_warm(series):
                level = step.baselines.level(series)
                self.lows[series] = min(self.lows.get(series, level) + self.config.drift_forget_decades, level)
                drifts.append(level - self.lows[series])
        return max(drifts)

    @property
    def in_excursion(self) -> bool:
        """Something was far above its usual within the last few steps."""
        return self.excursion is not None and self.number - self.excursion.last <= self.config.excursion_pause_steps

    def batch_near(self, number: int) -> Finding | None:
        """The batch out of range within a few steps of a step, if there was one."""
        if self.batch is None or abs(self.batch[0] - number) > self.config.bad_batch_within_steps:
            return None
        return self.batch[1]

    def blames_batch(self, number: int) -> bool:
        """Whether a batch within a few steps of a step was so far out of range that it explains what followed."""
        batch = self.batch_near(number)
        return batch is not None and (batch.ratio or 0) >= 10**self.config.bad_batch_decades

    def rate_before(self, number: int) -> Finding | None:
        """The jump of the learning rate shortly before a step, if there was one."""
        if self.rate is None or not 0 <= number - self.rate[0] <= self.config.cascade_within_steps:
            return None
        return self.rate[1]
