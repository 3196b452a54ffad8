"""What an entry of the catalogue is, and the names that derive from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from gradexporter.exposure import View

PREFIX = "gradexporter"

IDENTITY_LABELS = ("run_id", "rank")
"""On every series; the sinks put them there, entries leave them out."""

Labels = tuple[str, ...]
"""Label values in the order of the label names."""

Sample = tuple[Labels, float]

Read = Callable[[View], Iterable[Sample]]


class Rows(Iterable[Sample]):
    """Samples in columns: a scrape of ten thousand series then makes no pair of each."""

    __slots__ = ("labels", "readings")

    def __init__(self, labels: Sequence[Labels] = (), readings: Sequence[float] = ()) -> None:
        self.labels = tuple(labels)
        self.readings = readings

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Rows:
        """These samples as rows."""
        if isinstance(samples, Rows):
            return samples
        listed = list(samples)
        return cls([labels for labels, _ in listed], [float(reading) for _, reading in listed])

    def __iter__(self) -> Iterator[Sample]:
        return zip(self.labels, self.readings, strict=True)

    def __len__(self) -> int:
        return len(self.labels)


class Kind(Enum):
    """What a Prometheus server may assume about a family."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Unit(Enum):
    """Base unit: Prometheus suffix and UCUM code. A norm has none."""

    NONE = ("", "")
    SECONDS = ("seconds", "s")


class Section(str, Enum):
    """Where the README table and the dashboards put a family."""

    RUN = "run"
    LOSS = "loss, rate, scale"
    GLOBAL = "global magnitudes"
    LAYER = "per layer"
    JUDGEMENT = "judgement"
    CHECKPOINT = "checkpoint"
    SELF = "exporter"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricSpec:
    """One metric family and how it is read off a view of the published snapshot.

    ``read`` yields nothing where the value is absent, and NaN where NaN was measured. A histogram is
    read off ``Snapshot.gradient_norms`` by the sinks, so its ``read`` yields nothing.
    """

    path: str
    section: Section
    kind: Kind
    help: str
    """One sentence; says whether the value is this rank's share or global where that differs."""
    read: Read
    unit: Unit = Unit.NONE
    labels: tuple[str, ...] = ()
    stable: bool = False
    """A stable name changes only with a major version; the others may, with a note."""

    @property
    def base_name(self) -> str:
        """Prefix, path and unit: the Prometheus name without the ``_total`` of a counter."""
        suffix = self.unit.value[0]
        name = f"{PREFIX}_{self.path.replace('.', '_')}"
        return name if not suffix or name.endswith(f"_{suffix}") else f"{name}_{suffix}"

    @property
    def name(self) -> str:
        """Prometheus name."""
        return f"{self.base_name}_total" if self.kind is Kind.COUNTER else self.base_name

    @property
    def otlp_name(self) -> str:
        """OpenTelemetry name; the unit travels apart."""
        return f"{PREFIX}.{self.path}"


def gauge(
    section: Section,
    path: str,
    help: str,
    read: Read,
    *labels: str,
    unit: Unit = Unit.NONE,
    stable: bool = False,
) -> MetricSpec:
    """A value that goes up and down."""
    return MetricSpec(
        section=section, path=path, kind=Kind.GAUGE, help=help, read=read, labels=labels, unit=unit, stable=stable
    )


def counter(
    section: Section,
    path: str,
    help: str,
    read: Read,
    *labels: str,
    unit: Unit = Unit.NONE,
    stable: bool = False,
) -> MetricSpec:
    """A total since the process started; ``path`` leaves ``_total`` out."""
    return MetricSpec(
        section=section, path=path, kind=Kind.COUNTER, help=help, read=read, labels=labels, unit=unit, stable=stable
    )
