"""How readings are taken off a view: the functions that entries of the catalogue are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from gradexporter.exposure import View
from gradexporter.metrics.spec import Read, Rows, Sample
from gradexporter.records import FindingKind, FirstNonfinite, Mask, Shape, Snapshot, StepReport, Values


def nothing(view: View) -> Iterable[Sample]:
    """For a family that the sinks fill themselves."""
    return ()


def one(value: Callable[[View], float | None]) -> Read:
    """A family of one series, absent where ``value`` is None."""

    def samples(view: View) -> Iterator[Sample]:
        reading = value(view)
        if reading is not None:
            yield (), float(reading)

    return samples


def largest(name: str) -> Read:
    """A field of the reports; of several optimizers the largest, NaN if one is NaN."""
    return one(lambda view: _worst(max, name, view))


def smallest(name: str) -> Read:
    """A field of the reports; of several optimizers the smallest, NaN if one is NaN."""
    return one(lambda view: _worst(min, name, view))


def latest(value: Callable[[StepReport], float | None]) -> Read:
    """Something about the latest step of any optimizer."""
    return one(lambda view: None if (report := view.snapshot.report) is None else value(report))


def words(listed: Iterable[str], value: Callable[[Snapshot, str], float | None]) -> Read:
    """One series a word of a closed set; a word whose value is None is absent."""
    closed_set = tuple(listed)

    def samples(view: View) -> Iterator[Sample]:
        for word in closed_set:
            reading = value(view.snapshot, word)
            if reading is not None:
                yield (str(word),), float(reading)

    return samples


def attempted(read: Read) -> Read:
    """Puts the attempt in front: judgement series carry it, so that a restart opens a new incident."""

    def samples(view: View) -> Iterator[Sample]:
        attempt = view.snapshot.identity.attempt
        for labels, value in read(view):
            yield (attempt, *labels), value

    return samples


def layer(column: str) -> Read:
    """A statistic of each layer that it was observed for."""
    return lambda view: _rows(view.rows, view.layers.column(column))


def layer_total(column: str) -> Read:
    """A count of each layer since the start."""
    return lambda view: _rows(view.rows, view.layer_totals.column(column))


def run_info_labels(view: View) -> dict[str, str]:
    """Labels of run_info: who the run is, and the user's routing labels."""
    identity = view.snapshot.identity
    return {
        "attempt": identity.attempt,
        "local_rank": str(identity.local_rank),
        "world_size": str(identity.world_size),
        "model": identity.model,
        "norms": view.snapshot.itself.norms,
        "optimizer": identity.optimizer,
        "paging": "on" if identity.paging else "off",
        **identity.labels,
    }


def health(view: View) -> float | None:
    """Code of the worst state; a run without a step is warming up, one that nobody judges has none."""
    run = view.snapshot
    return 0.0 if not run.reports else None if run.state is None else float(run.state.code)


def last_finding(what: str) -> Callable[[Snapshot, str], float | None]:
    """Step or timestamp of the last finding of a kind."""

    def value(run: Snapshot, kind: str) -> float | None:
        last = run.last_findings.get(FindingKind(kind))
        return None if last is None else float(getattr(last, what))

    return value


def diagnosed(run: Snapshot, shape: str) -> float:
    """1 if a current diagnosis is of this shape."""
    return float(any(report.diagnosis is not None and report.diagnosis.shape is Shape(shape) for report in run.reports))


def first_nonfinite(run: Snapshot) -> FirstNonfinite | None:
    """The run's first non-finite place."""
    places = [report.first_nonfinite for report in run.reports if report.first_nonfinite is not None]
    return min(places, key=lambda place: place.step, default=None)


def _worst(choose: Callable[[Iterable[float]], float], name: str, view: View) -> float | None:
    values = [value for reading in view.snapshot.readings if (value := getattr(reading, name)) is not None]
    if not values:
        return None
    return math.nan if any(map(math.isnan, values)) else float(choose(values))


def _rows(labels: tuple[tuple[str], ...], column: tuple[Values, Mask] | None) -> Rows:
    if column is None:
        return Rows()
    values, observed = column
    if observed.all():
        return Rows(labels, values.tolist())
    return Rows(tuple(itertools.compress(labels, observed.tolist())), values[observed].tolist())
