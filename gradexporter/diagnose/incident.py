"""One incident: the steps from the first odd one until the run is healthy again, and its failure shape."""

from __future__ import annotations

from dataclasses import dataclass

from gradexporter.config import JudgeConfig
from gradexporter.detect import Detection
from gradexporter.diagnose.trail import Trail
from gradexporter.records import NONFINITE_QUANTITIES, Finding, FindingKind, Quantity, Severity, Shape, State

SMALL_DTYPE = 1e6
"""Largest values below it are half precision's; a bfloat16 reaches as far as a float32."""


@dataclass(slots=True)
class Incident:
    """What is known of an open incident; every odd step adds to it."""

    number: int
    """Count of judged steps at which it opened."""
    since_step: int
    clean_step: int | None
    """The last healthy step before it."""
    opening: Finding
    """The finding that opened it, the worst of its step."""
    usual_norm: float | None
    """What the gradient norm usually was when it opened."""
    resumed: bool
    """The run was continued from a checkpoint just before."""
    lead_in: tuple[str, ...]
    """Evidence of what led up to it."""
    state: State
    peak: Finding | None = None
    """The largest gradient norm of the incident."""
    nonfinite: Finding | None = None
    """The first that was not finite."""
    weights_lost: bool = False
    """Parameters were seen that are not finite."""
    shape: Shape = Shape.SPIKE_CASCADE

    @property
    def severity(self) -> Severity:
        """A spike is a warning, all else pages."""
        return Severity.WARNING if self.state is State.SPIKE else Severity.CRITICAL

    @property
    def layer(self) -> str | None:
        """The best culprit: where it went non-finite, else what stood out when it opened."""
        return self.nonfinite.layer if self.nonfinite is not None else self.opening.layer

    @property
    def culprit(self) -> str:
        """The culprit in a sentence."""
        if self.layer is None or self.layer in NONFINITE_QUANTITIES:
            return "the layer with the largest values"
        return f"layer {self.layer}"

    def add(self, detection: Detection, trail: Trail, config: JudgeConfig) -> None:
        """Takes one more odd step in and settles the shape anew, unless that is final."""
        if detection.state is not None and detection.state.code > self.state.code:
            self.state = detection.state
        self.weights_lost = self.weights_lost or Quantity.PARAMETER in detection.step.nonfinite
        loud = {finding.kind: finding for finding in detection.findings if finding.severity is not Severity.INFO}
        spike = loud.get(FindingKind.GRADIENT_SPIKE)
        if spike is not None and (self.peak is None or (spike.ratio or 0) > (self.peak.ratio or 0)):
            self.peak = spike
        if self.nonfinite is not None:
            return
        self.nonfinite = loud.get(FindingKind.NONFINITE)
        if self.nonfinite is None:
            self.shape = self._finite_shape(detection, trail, config)
            return
        self.shape = self._nonfinite_shape(detection, trail, config, self.nonfinite)
        if self.shape in AT_ONCE:
            self.since_step = self.nonfinite.step

    def _nonfinite_shape(self, detection: Detection, trail: Trail, config: JudgeConfig, found: Finding) -> Shape:
        if trail.number <= config.nan_from_start_steps:
            return Shape.RESUME_MISMATCH if self.resumed else Shape.NAN_FROM_START
        if found.quantity is Quantity.INPUT:
            return Shape.BAD_INPUT
        half = detection.step.report.dtype_max < SMALL_DTYPE and found.quantity is Quantity.ACTIVATION
        if trail.in_excursion:
            return self._excursion_shape(trail, config, half)
        if trail.blames_batch(trail.number) and found.quantity is Quantity.ACTIVATION:
            return Shape.HALF_PRECISION_OVERFLOW if half else Shape.BAD_BATCH
        early = trail.number <= config.warmup_steps and trail.early_decades > config.warmup_jump_decades
        if early or trail.headroom_decades < config.near_limit_decades:
            return Shape.HALF_PRECISION_OVERFLOW if half else Shape.EXPLODING_GRADIENT
        return Shape.UNDEFINED_OPERATION

    def _finite_shape(self, detection: Detection, trail: Trail, config: JudgeConfig) -> Shape:
        overflow = [finding for finding in detection.findings if finding.kind is FindingKind.OVERFLOW_IMMINENT]
        half = detection.step.report.dtype_max < SMALL_DTYPE and any(
            finding.quantity is Quantity.ACTIVATION for finding in overflow
        )
        if self.resumed:
            return Shape.RESUME_MISMATCH
        if trail.in_excursion:
            return self._excursion_shape(trail, config, half)
        return Shape.HALF_PRECISION_OVERFLOW if half else Shape.EXPLODING_GRADIENT

    def _excursion_shape(self, trail: Trail, config: JudgeConfig, half: bool) -> Shape:
        excursion = trail.excursion
        assert excursion is not None
        if trail.blames_batch(excursion.number):
            return Shape.BAD_BATCH
        if half and self.peak is None:
            return Shape.HALF_PRECISION_OVERFLOW
        is_past_peak = excursion.decades < excursion.peak_decades - config.past_peak_decades
        explodes = excursion.longest >= config.exploding_steps and not is_past_peak
        if explodes or excursion.drift_decades >= config.exploding_drift_decades:
            return Shape.HALF_PRECISION_OVERFLOW if half else Shape.EXPLODING_GRADIENT
        return Shape.SPIKE_CASCADE


AT_ONCE = (Shape.UNDEFINED_OPERATION, Shape.BAD_INPUT, Shape.NAN_FROM_START)
"""Shapes that nothing led up to: they begin where the first value was not finite."""
