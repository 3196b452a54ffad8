"""The verdict on one step: detect, then diagnose, and the state that follows from both.

The one entry that the monitor, replays and tests use; torch is not needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradexporter.config import Config, JudgeConfig
from gradexporter.detect import Detection, Detector, Step, ratio
from gradexporter.diagnose import Diagnoser
from gradexporter.records import FirstNonfinite, LayerTable, State, StepReport


class Judge:
    """Judges the steps of one run, one call a step and in order; keeps baselines, never reports.

    Each optimizer of the run is judged against baselines of its own. Used by one thread.
    """

    def __init__(self, config: JudgeConfig | Config | None = None) -> None:
        self._config = config.judge if isinstance(config, Config) else config or JudgeConfig()
        self._tracks: dict[int, _Track] = {}
        self._first_nonfinite: FirstNonfinite | None = None

    def __call__(self, report: StepReport) -> StepReport:
        """The report with its state, findings, diagnosis and everything else that a judge sets."""
        track = self._tracks.get(report.optimizer)
        if track is None:
            track = self._tracks[report.optimizer] = _Track(self._config)
        judged = track.judge(report, self._first_nonfinite)
        self._first_nonfinite = judged.first_nonfinite
        return judged

    def state_dict(self) -> dict[str, Any]:
        """What a continued run is judged by, in plain Python, to be saved with a checkpoint."""
        return {"version": 1, "optimizers": {str(index): track.state_dict() for index, track in self._tracks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with saved baselines: without warm-up, and what is odd at once is the restart's doing.

        Raises ValueError for a state that no ``state_dict()`` of this version has written.
        """
        if state.get("version") != 1:
            raise ValueError(f"cannot load a judge's state of version {state.get('version')!r}: 1 is known")
        self._tracks = {}
        for index, saved in state["optimizers"].items():
            self._tracks[int(index)] = _Track(self._config)
            self._tracks[int(index)].load_state_dict(saved)


class _Track:
    """The judgement of one optimizer's steps."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._detector = Detector(config)
        self._diagnoser = Diagnoser(config)
        self._odd: dict[State, int] = {}
        self._state = State.WARMING_UP
        self._last_healthy: int | None = None

    def judge(self, report: StepReport, first: FirstNonfinite | None) -> StepReport:
        detection = self._detector(report)
        step, baselines = detection.step, self._detector.baselines
        self._state = self._next_state(detection)
        diagnosis = self._diagnoser(detection, self._state, self._last_healthy)
        if self._state is State.HEALTHY and not self._diagnoser.is_wary:
            self._last_healthy = report.step
        warm = baselines.is_warm("gradient_norm")
        return dataclasses.replace(
            report,
            layers=_with_spike_ratio(report.layers, step),
            state=self._state,
            findings=detection.findings,
            diagnosis=diagnosis,
            last_healthy_step=self._last_healthy,
            first_nonfinite=first or detection.first_nonfinite,
            gradient_norm_baseline=baselines.usual("gradient_norm") if warm else None,
            gradient_spike_ratio=_spike_ratio(step),
            overflow_headroom_decades=min((headroom.decades for headroom in step.headrooms), default=None),
            steps_to_overflow=detection.steps_to_overflow if self._state in (State.SPIKE, State.CASCADE) else None,
        )

    def _next_state(self, detection: Detection) -> State:
        """The worst of the last steps; healthy again once enough of them were clean."""
        number = detection.step.number
        if detection.state is not None:
            self._odd[detection.state] = number
        for state in (State.NONFINITE, State.CASCADE, State.SPIKE):
            if state in self._odd and number - self._odd[state] < self._config.clean_steps:
                return state
        return State.HEALTHY if detection.is_warm else State.WARMING_UP

    def state_dict(self) -> dict[str, Any]:
        return {
            "detector": self._detector.state_dict(),
            "state": self._state.value,
            "last_healthy_step": self._last_healthy,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._detector.load_state_dict(state["detector"])
        self._last_healthy = state["last_healthy_step"]
        # A run that was in trouble when it was saved may well be so again.
        if State(state["state"]) is State.HEALTHY:
            self._detector.expect_trouble(self._config.resume_steps)


def _spike_ratio(step: Step) -> float | None:
    """The gradient norm over its baseline, NaN and Inf as they are."""
    norm = step.report.gradient_norm
    lost = norm is not None and not math.isfinite(norm) and step.report.applied is not False
    return norm if lost and step.baselines.is_warm("gradient_norm") else ratio(step.deviation("gradient_norm"))


def _with_spike_ratio(table: LayerTable, step: Step) -> LayerTable:
    deviation, norms = step.layer_deviation("gradient_norm"), table.column("gradient_norm")
    if deviation is None or norms is None:
        return table
    lost = norms[1] & ~np.isfinite(norms[0]) & step.baselines.layer_is_warm("gradient_norm")
    known = lost | ~np.isnan(deviation)
    return table.with_column("spike_ratio", np.where(lost, norms[0], 10.0**deviation), known) if known.any() else table
