"""The verdict on one step: detect, then diagnose, and the state that follows from both.

The one entry that the monitor, replays and tests use; torch is not needed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gradexporter.config import Config, JudgeConfig
from gradexporter.detect import Detector
from gradexporter.records import FirstNonfinite, State, StepReport


class Judge:
    """Judges the steps of one run, in order; keeps baselines, never reports.

    Each optimizer of the run is judged against baselines of its own.
    """

    def __init__(self, config: JudgeConfig | Config | None = None) -> None:
        if isinstance(config, Config):
            config = config.judge
        self._config = config or JudgeConfig()
        self._tracks: dict[int, _Track] = {}
        self._first_nonfinite: FirstNonfinite | None = None

    def __call__(self, report: StepReport) -> StepReport:
        """The report with state, findings, diagnosis and everything else that a judge sets."""
        track = self._tracks.get(report.optimizer)
        if track is None:
            track = self._tracks[report.optimizer] = _Track(self._config)
        judged = track.judge(report, self._first_nonfinite)
        self._first_nonfinite = judged.first_nonfinite
        return judged


class _Track:
    """The judgement of one optimizer's steps."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._detector = Detector(config)
        self._seen = 0
        self._last_odd: dict[State, int] = {}
        self._last_healthy: int | None = None

    def judge(self, report: StepReport, first: FirstNonfinite | None) -> StepReport:
        detection = self._detector(report)
        self._seen += 1
        if detection.state is not None:
            self._last_odd[detection.state] = self._seen
        state = self._state(detection.warm)
        if state is State.HEALTHY:
            self._last_healthy = report.step
        deviation = detection.layer_deviation
        layers = report.layers
        if deviation is not None:
            known = ~np.isnan(deviation)
            if known.any():
                layers = layers.with_column("spike_ratio", 10.0 ** np.minimum(deviation, 300.0), known)
        return dataclasses.replace(
            report,
            layers=layers,
            state=state,
            findings=detection.findings,
            diagnosis=None,
            last_healthy_step=self._last_healthy,
            first_nonfinite=first or detection.first_nonfinite,
            gradient_norm_baseline=detection.gradient_norm_baseline,
            gradient_spike_ratio=detection.gradient_spike_ratio,
            overflow_headroom_decades=detection.headroom,
            steps_to_overflow=detection.steps_to_overflow if state in (State.SPIKE, State.CASCADE) else None,
        )

    def _state(self, warm: bool) -> State:
        for state in (State.NONFINITE, State.CASCADE, State.SPIKE):
            if state in self._last_odd and self._seen - self._last_odd[state] < self._config.clean_steps:
                return state
        return State.HEALTHY if warm else State.WARMING_UP
