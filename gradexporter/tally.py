"""The running totals of a run: reports go in one by one, one immutable Snapshot comes out.

Between two scrapes a cascade can begin and end, so events are counted, peaks are kept over fixed
windows, and statistics that are sampled keep their last reading.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from gradexporter.records import (
    NONFINITE_QUANTITIES,
    FindingKind,
    Histogram,
    Identity,
    LastFinding,
    LayerTable,
    Mask,
    Quantity,
    SelfStats,
    Severity,
    Snapshot,
    StepReport,
    Values,
)

PEAK_WINDOW_SECONDS = 60.0
"""A peak covers the last 30 to 60 seconds: two buckets of half the window that take turns."""

NORM_BOUNDS = (*(float(f"1e{exponent}") for exponent in range(-6, 13)), math.inf)
"""Upper bounds of the histogram of gradient norms, one a decade."""

MOST_CHECKPOINTS = 1000
"""Checkpoints that are remembered, the newest."""

SAMPLED = (
    "gradient_max_abs",
    "activation_max_abs",
    "momentum_max_abs",
    "second_moment_max_abs",
    "parameter_max_abs",
    "parameter_norm",
    "update_ratio",
)
"""Run-level statistics that a step may leave out; the last reading stands until the next."""

SAMPLED_COLUMNS = (*SAMPLED, "activation_rms", "activation_zero_ratio")
"""The same for layers."""

COUNTED_COLUMNS = ("gradient_nonfinite", "activation_nonfinite")
"""Counts of one step that are added up for each layer."""

_MAGNITUDES = {
    "input_max_abs": Quantity.INPUT,
    "activation_max_abs": Quantity.ACTIVATION,
    "loss": Quantity.LOSS,
    "gradient_norm": Quantity.GRADIENT,
    "gradient_max_abs": Quantity.GRADIENT,
    "parameter_norm": Quantity.PARAMETER,
    "parameter_max_abs": Quantity.PARAMETER,
    "momentum_max_abs": Quantity.OPTIMIZER_STATE,
    "second_moment_max_abs": Quantity.OPTIMIZER_STATE,
}
"""A magnitude that is not finite makes a step non-finite, whether or not its elements were counted."""


class Tally:
    """Adds up the reports of one run; used by one thread."""

    def __init__(self, identity: Identity, clock: Callable[[], float], aligned_every: int = 100) -> None:
        """``clock`` gives Unix seconds; ``aligned_every`` is that of Config."""
        self._clock = clock
        self._aligned_every = aligned_every
        self._layers: dict[int, _Layers] = {}
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

    def refresh(self, itself: SelfStats) -> Snapshot:
        """The snapshot with what the exporter knows about itself now."""
        self._snapshot = dataclasses.replace(self._snapshot, itself=itself)
        return self._snapshot

    def add(self, report: StepReport, itself: SelfStats) -> Snapshot:
        """The snapshot after one more judged step."""
        before = self._snapshot
        now = self._clock()
        reports = _replaced(before.reports, report)
        layers = self._layers.setdefault(report.optimizer, _Layers())
        layers.add(report.layers)
        self._observe(report.gradient_norm)
        applied = report.applied is not False
        aligned = before.aligned_step, before.aligned_gradient_norm
        if report.step % self._aligned_every == 0:
            aligned = report.step, report.gradient_norm
        clipped = applied and (report.clipped or (report.clip_factor is not None and report.clip_factor < 1))
        self._snapshot = dataclasses.replace(
            before,
            reports=reports,
            readings=_replaced(before.readings, _carried(report, before.readings)),
            layers=_joined([self._layers[index].readings for index in sorted(self._layers)]),
            layer_totals=_joined([self._layers[index].totals for index in sorted(self._layers)]),
            steps_applied=before.steps_applied + applied,
            steps_skipped=before.steps_skipped + (not applied),
            step_seconds=before.step_seconds + (report.step_seconds or 0.0),
            clipped_steps=before.clipped_steps + clipped,
            findings=_counted(before.findings, _kinds(report)),
            last_findings=_last_findings(before, report, now),
            nonfinite_steps=_counted(before.nonfinite_steps, _nonfinite(report)),
            gradient_norm_peak=self._norm_peak.add(report.gradient_norm, now),
            gradient_spike_ratio_peak=self._ratio_peak.add(report.gradient_spike_ratio, now),
            gradient_norms=Histogram(
                bounds=NORM_BOUNDS, counts=tuple(itertools.accumulate(self._norm_counts)), sum=self._norm_sum
            ),
            aligned_step=aligned[0],
            aligned_gradient_norm=aligned[1],
            last_clean_checkpoint_step=self._clean(reports),
            itself=itself,
        )
        return self._snapshot

    def identify(self, identity: Identity) -> Snapshot:
        """The snapshot under another identity."""
        self._snapshot = dataclasses.replace(self._snapshot, identity=identity)
        return self._snapshot

    def phase(self, phase: str) -> Snapshot:
        """The snapshot with the run in another phase: train, eval or checkpoint."""
        self._snapshot = dataclasses.replace(self._snapshot, phase=phase)
        return self._snapshot

    def checkpoint(self, step: int) -> Snapshot:
        """The snapshot after a checkpoint of ``step`` was written."""
        bisect.insort(self._checkpoints, step)
        del self._checkpoints[:-MOST_CHECKPOINTS]
        self._snapshot = dataclasses.replace(
            self._snapshot,
            last_checkpoint_step=step,
            last_checkpoint_timestamp=self._clock(),
            last_clean_checkpoint_step=self._clean(self._snapshot.reports),
        )
        return self._snapshot

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Steps whose checkpoints were written, oldest first."""
        return tuple(self._checkpoints)

    def resume(self, checkpoints: Iterable[int], step: int, timestamp: float) -> Snapshot:
        """The snapshot of a run that goes on from a checkpoint of ``step``, written at ``timestamp``."""
        self._checkpoints = sorted({*(one for one in checkpoints if one <= step), step})[-MOST_CHECKPOINTS:]
        self._snapshot = dataclasses.replace(
            self._snapshot,
            last_checkpoint_step=step,
            last_checkpoint_timestamp=timestamp,
            last_clean_checkpoint_step=self._clean(self._snapshot.reports),
        )
        return self._snapshot

    def end(self, reason: str, itself: SelfStats) -> Snapshot:
        """The final snapshot."""
        self._snapshot = dataclasses.replace(self._snapshot, ended=reason, itself=itself)
        return self._snapshot

    def _observe(self, norm: float | None) -> None:
        if norm is not None and math.isfinite(norm):
            self._norm_counts[bisect.bisect_left(NORM_BOUNDS, norm)] += 1
            self._norm_sum += norm

    def _clean(self, reports: Iterable[StepReport]) -> int | None:
        """The newest checkpoint of a step that every optimizer holds healthy."""
        healthy = [report.last_healthy_step for report in reports]
        known = [step for step in healthy if step is not None]
        if not known or len(known) < len(healthy):
            return None
        position = bisect.bisect_right(self._checkpoints, min(known))
        return self._checkpoints[position - 1] if position else None


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


class _Layers:
    """Layers of one optimizer: last readings, and totals of what each step counts."""

    def __init__(self) -> None:
        self.readings = LayerTable()
        self.totals = LayerTable()

    def add(self, table: LayerTable) -> None:
        """Takes in the layers of one step; a step without any leaves names and totals as they are."""
        names = table.names or self.readings.names
        carried: dict[str, tuple[Values, Mask]] = {}
        if names == self.readings.names:
            columns = self.readings.columns
            carried = {column: columns[column] for column in SAMPLED_COLUMNS if column in columns}
        self.readings = LayerTable(names, {**carried, **table.columns})
        if names != self.totals.names:
            self.totals = _realigned(self.totals, names)
        totals = dict(self.totals.columns)
        for column in COUNTED_COLUMNS:
            pair = table.column(column)
            if pair is not None:
                totals[column] = _added(totals.get(column), pair)
        self.totals = LayerTable(names, totals)


def _added(total: tuple[Values, Mask] | None, pair: tuple[Values, Mask]) -> tuple[Values, Mask]:
    values, observed = pair
    counts = np.where(observed & (values > 0), values, 0.0)
    if total is None:
        return counts, observed
    return total[0] + counts, total[1] | observed


def _realigned(totals: LayerTable, names: tuple[str, ...]) -> LayerTable:
    """These totals for other layers; a layer that was not there before has none."""
    position = {name: index for index, name in enumerate(totals.names)}
    source = np.array([position.get(name, -1) for name in names], dtype=int)
    columns = {
        column: (np.where(source >= 0, values[source], 0.0), (source >= 0) & observed[source])
        for column, (values, observed) in totals.columns.items()
    }
    return LayerTable(names, columns)


def _joined(tables: list[LayerTable]) -> LayerTable:
    if len(tables) == 1:
        return tables[0]
    names = tuple(itertools.chain.from_iterable(table.names for table in tables))
    columns: dict[str, tuple[Values, Mask]] = {}
    for column in dict.fromkeys(itertools.chain.from_iterable(table.columns for table in tables)):
        parts = [table.columns.get(column) or _unobserved(len(table)) for table in tables]
        columns[column] = (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    return LayerTable(names, columns)


def _unobserved(size: int) -> tuple[Values, Mask]:
    return np.full(size, np.nan), np.zeros(size, dtype=bool)


def _replaced(reports: tuple[StepReport, ...], report: StepReport) -> tuple[StepReport, ...]:
    others = [other for other in reports if other.optimizer != report.optimizer]
    return tuple(sorted([*others, report], key=lambda one: one.optimizer)) if others else (report,)


def _carried(report: StepReport, readings: tuple[StepReport, ...]) -> StepReport:
    before = next((reading for reading in readings if reading.optimizer == report.optimizer), None)
    if before is None:
        return report
    missing = {name: getattr(before, name) for name in SAMPLED if getattr(report, name) is None}
    return dataclasses.replace(report, **missing) if missing else report


_What = TypeVar("_What", FindingKind, Quantity)


def _counted(counts: Mapping[_What, int], happened: set[_What]) -> Mapping[_What, int]:
    if not happened:
        return counts
    return {what: count + (what in happened) for what, count in counts.items()}


def _kinds(report: StepReport) -> set[FindingKind]:
    """Kinds of the step's findings, without a single layer's spike: alerts on these series are about the run."""
    return {
        finding.kind
        for finding in report.findings
        if finding.kind is not FindingKind.GRADIENT_SPIKE or finding.severity is not Severity.INFO
    }


def _last_findings(before: Snapshot, report: StepReport, now: float) -> Mapping[FindingKind, LastFinding]:
    kinds = _kinds(report)
    if not kinds:
        return before.last_findings
    when = now if report.timestamp is None else report.timestamp
    last = LastFinding(step=report.step, timestamp=when)
    return {**before.last_findings, **dict.fromkeys(kinds, last)}


def _nonfinite(report: StepReport) -> set[Quantity]:
    """Quantities that are not finite in this step."""
    odd = {quantity for quantity in NONFINITE_QUANTITIES if report.nonfinite.get(quantity.value)}
    for name, quantity in _MAGNITUDES.items():
        value = getattr(report, name)
        if value is not None and not math.isfinite(value):
            odd.add(quantity)
    if report.applied is False:
        odd.discard(Quantity.GRADIENT)  # how a loss scaler finds its scale, not an error
    return odd
