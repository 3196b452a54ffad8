"""The running totals of a run: reports go in one by one, one immutable Snapshot comes out.

Between two scrapes a cascade can begin and end, so events are counted, peaks are kept over fixed
windows, and statistics that are sampled keep their last reading.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from gradexporter.records import (
    NONFINITE_QUANTITIES,
    FindingKind,
    Histogram,
    Identity,
    LastFinding,
    LayerTable,
    Quantity,
    SelfStats,
    Snapshot,
    StepReport,
)

PEAK_WINDOW_SECONDS = 60.0
"""A peak covers the last 30 to 60 seconds: two buckets of half the window that take turns."""

NORM_BOUNDS = tuple(10.0**exponent for exponent in range(-6, 13)) + (math.inf,)
"""Upper bounds of the histogram of gradient norms, one a decade."""

_SAMPLED = (
    "activation_max_abs",
    "momentum_max_abs",
    "second_moment_max_abs",
    "parameter_max_abs",
    "parameter_norm",
    "update_ratio",
)
"""Run-level statistics that a step may leave out; the last reading stands until the next."""


class Tally:
    """Adds up the reports of one run; used by one thread."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """``clock`` gives Unix seconds."""
        self._clock = clock
        self._tables: dict[int, LayerTable] = {}
        self._norm_peak = Peak()
        self._ratio_peak = Peak()
        self._norm_counts = [0] * len(NORM_BOUNDS)
        self._norm_sum = 0.0
        self._checkpoints: list[int] = []
        self._snapshot = Snapshot(
            identity=identity,
            findings=dict.fromkeys(FindingKind, 0),
            nonfinite_steps=dict.fromkeys(NONFINITE_QUANTITIES, 0),
            gradient_norms=Histogram(bounds=NORM_BOUNDS, counts=tuple(self._norm_counts)),
        )

    @property
    def snapshot(self) -> Snapshot:
        """Everything up to the last call, as one immutable record."""
        return self._snapshot

    def add(self, report: StepReport, itself: SelfStats) -> Snapshot:
        """The snapshot after one more judged step."""
        before = self._snapshot
        now = self._clock()
        earlier = {earlier.optimizer: earlier for earlier in before.reports}
        report = _carried(report, earlier.get(report.optimizer))
        self._tables[report.optimizer] = _carried_layers(report.layers, self._tables.get(report.optimizer))
        earlier[report.optimizer] = report
        applied = report.applied is not False
        norm, ratio = report.gradient_norm, report.gradient_spike_ratio
        if norm is not None and math.isfinite(norm):
            self._norm_counts[bisect.bisect_left(NORM_BOUNDS, norm)] += 1
            self._norm_sum += norm
        clipped = applied and report.clip_factor is not None and report.clip_factor < 1
        self._snapshot = dataclasses.replace(
            before,
            reports=tuple(earlier[index] for index in sorted(earlier)),
            layers=_joined([self._tables[index] for index in sorted(self._tables)]),
            layer_gradient_nonfinite=_accumulated(before.layer_gradient_nonfinite, report.layers, "gradient_nonfinite"),
            layer_activation_nonfinite=_accumulated(
                before.layer_activation_nonfinite, report.layers, "activation_nonfinite"
            ),
            steps_applied=before.steps_applied + applied,
            steps_skipped=before.steps_skipped + (not applied),
            step_seconds=before.step_seconds + (report.step_seconds or 0.0),
            clipped_steps=before.clipped_steps + clipped,
            findings=_counted(before, report),
            last_findings={
                **before.last_findings,
                **{
                    finding.kind: LastFinding(step=report.step, timestamp=report.timestamp or now)
                    for finding in report.findings
                },
            },
            nonfinite_steps=_counted_nonfinite(before, report),
            gradient_norm_peak=self._norm_peak.add(norm, now),
            gradient_spike_ratio_peak=self._ratio_peak.add(ratio, now),
            gradient_norms=Histogram(
                bounds=NORM_BOUNDS, counts=tuple(itertools.accumulate(self._norm_counts)), sum=self._norm_sum
            ),
            last_clean_checkpoint_step=self._clean(report.last_healthy_step),
            itself=itself,
        )
        return self._snapshot

    def phase(self, phase: str) -> Snapshot:
        """The snapshot with the run in another phase: train, eval or checkpoint."""
        self._snapshot = dataclasses.replace(self._snapshot, phase=phase)
        return self._snapshot

    def checkpoint(self, step: int) -> Snapshot:
        """The snapshot after a checkpoint of ``step`` was written."""
        self._checkpoints = [*self._checkpoints[-999:], step]
        latest = self._snapshot.report
        self._snapshot = dataclasses.replace(
            self._snapshot,
            last_checkpoint_step=step,
            last_checkpoint_timestamp=self._clock(),
            last_clean_checkpoint_step=self._clean(latest.last_healthy_step if latest else None),
        )
        return self._snapshot

    def end(self, reason: str, itself: SelfStats) -> Snapshot:
        """The final snapshot."""
        self._snapshot = dataclasses.replace(self._snapshot, ended=reason, itself=itself)
        return self._snapshot

    def _clean(self, last_healthy_step: int | None) -> int | None:
        if last_healthy_step is None:
            return None
        return max((step for step in self._checkpoints if step <= last_healthy_step), default=None)


class Peak:
    """Maximum of the last 30 to 60 seconds; reading it changes nothing, so any number may scrape."""

    def __init__(self, window_seconds: float = PEAK_WINDOW_SECONDS) -> None:
        self._half = window_seconds / 2
        self._bucket = 0
        self._now: float | None = None
        self._before: float | None = None

    def add(self, value: float | None, now: float) -> float | None:
        """The peak with ``value`` counted in; NaN and None leave it as it was, +Inf is a maximum."""
        bucket = int(now // self._half)
        if bucket != self._bucket:
            self._before = self._now if bucket == self._bucket + 1 else None
            self._now = None
            self._bucket = bucket
        if value is not None and not math.isnan(value):
            self._now = value if self._now is None else max(self._now, value)
        return max((peak for peak in (self._now, self._before) if peak is not None), default=None)


def _carried(report: StepReport, before: StepReport | None) -> StepReport:
    if before is None:
        return report
    missing = {name: getattr(before, name) for name in _SAMPLED if getattr(report, name) is None}
    return dataclasses.replace(report, **missing) if missing else report


def _carried_layers(table: LayerTable, before: LayerTable | None) -> LayerTable:
    if before is None or before.names != table.names:
        return table
    return LayerTable(table.names, {**before.columns, **table.columns})


def _joined(tables: list[LayerTable]) -> LayerTable:
    if len(tables) == 1:
        return tables[0]
    names = tuple(name for table in tables for name in table.names)
    columns = {}
    for column in dict.fromkeys(column for table in tables for column in table.columns):
        parts = [
            table.columns.get(column, (np.full(len(table), np.nan), np.zeros(len(table), dtype=bool)))
            for table in tables
        ]
        columns[column] = (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    return LayerTable(names, columns)


def _accumulated(before: Mapping[str, float], table: LayerTable, column: str) -> Mapping[str, float]:
    pair = table.column(column)
    if pair is None:
        return before
    values, observed = pair
    fresh = {name: 0.0 for name in itertools.compress(table.names, observed) if name not in before}
    hit = np.flatnonzero(observed & (values > 0))
    if not fresh and not len(hit):
        return before
    summed = {**before, **fresh}
    for index in hit:
        summed[table.names[index]] += float(values[index])
    return summed


def _counted(before: Snapshot, report: StepReport) -> dict[FindingKind, int]:
    counts = dict(before.findings)
    for kind in {finding.kind for finding in report.findings}:
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _counted_nonfinite(before: Snapshot, report: StepReport) -> dict[Quantity, int]:
    odd = {Quantity(word) for word, count in report.nonfinite.items() if count}
    if report.loss is not None and not math.isfinite(report.loss):
        odd.add(Quantity.LOSS)
    if report.applied is False:
        odd.discard(Quantity.GRADIENT)  # how a loss scaler finds its scale, not an error
    counts = dict(before.nonfinite_steps)
    for quantity in odd & counts.keys():
        counts[quantity] += 1
    return counts
