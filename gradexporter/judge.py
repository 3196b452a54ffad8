"""The verdict on one step: detect, then diagnose, and the state that follows from both.

The one entry that the monitor, replays and tests use; torch is not needed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gradexporter.config import Config, JudgeConfig
from gradexporter.detect import Detection, Detector, ratio
from gradexporter.diagnose import Diagnoser
from gradexporter.records import FirstNonfinite, LayerTable, State, StepReport


class Judge:
    """Judges the steps of one run, in order; keeps baselines, never reports.

    Each optimizer of the run is judged against baselines of its own.
    """

    def __init__(self, config: JudgeConfig | Config | None = None) -> None:
        self._config = config.judge if isinstance(config, Config) else config or JudgeConfig()
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
        self._diagnoser = Diagnoser(config)
        self._last_odd: dict[State, int] = {}
        self._last_healthy: int | None = None

    def judge(self, report: StepReport, first: FirstNonfinite | None) -> StepReport:
        detection = self._detector(report)
        step, number = detection.step, detection.step.number
        if detection.state is not None:
            self._last_odd[detection.state] = number
        state = self._state(detection)
        if state is State.HEALTHY:
            self._last_healthy = report.step
        if first is None and detection.state is State.NONFINITE:
            found = detection.findings[0]
            first = FirstNonfinite(step=report.step, layer=found.layer or "", quantity=found.quantity)
        baselines = self._detector.baselines
        return dataclasses.replace(
            report,
            layers=_with_spike_ratio(report.layers, detection),
            state=state,
            findings=detection.findings,
            diagnosis=self._diagnoser(detection, state, self._last_healthy),
            last_healthy_step=self._last_healthy,
            first_nonfinite=first,
            gradient_norm_baseline=baselines.usual("gradient_norm") if baselines.is_warm("gradient_norm") else None,
            gradient_spike_ratio=ratio(step.deviation("gradient_norm")),
            overflow_headroom_decades=min((headroom.decades for headroom in step.headrooms), default=None),
            steps_to_overflow=detection.steps_to_overflow if state in (State.SPIKE, State.CASCADE) else None,
        )

    def _state(self, detection: Detection) -> State:
        for state in (State.NONFINITE, State.CASCADE, State.SPIKE):
            if state in self._last_odd and detection.step.number - self._last_odd[state] < self._config.clean_steps:
                return state
        return State.HEALTHY if detection.warm else State.WARMING_UP


def _with_spike_ratio(table: LayerTable, detection: Detection) -> LayerTable:
    deviation = detection.step.layer_deviation("gradient_norm")
    if deviation is None:
        return table
    known = ~np.isnan(deviation)
    return table.with_column("spike_ratio", 10.0**deviation, known) if known.any() else table
