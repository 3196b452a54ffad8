"""Families of the catalogue, read off one snapshot, for a prometheus_client registry and for our renderer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gradexporter.exposure import Exposure, View
from gradexporter.metrics import CATALOG, IDENTITY_LABELS, SERIES, Kind, MetricSpec, Rows, Section, label_names
from gradexporter.records import Histogram, LayerTable, Snapshot

PART = "endpoint"
"""What a fault of this sink is counted under."""

OnFailure = Callable[[str, BaseException], None]

_log = logging.getLogger("gradexporter")


def log_failure(part: str, error: BaseException) -> None:
    """Logs a fault, for those who bring no fence of their own."""
    _log.warning("gradexporter: %s failed", part, exc_info=error)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of one scrape."""

    spec: MetricSpec
    labels: tuple[str, ...]
    """Label names, those of identity first; the samples leave identity out."""
    samples: Rows
    histogram: Histogram | None = None

    @property
    def size(self) -> int:
        """Series that the family is exposed as."""
        return len(self.samples) if self.histogram is None else len(self.histogram.bounds) + 2


class Source:
    """Reads the families of one immutable snapshot a scrape; a family that fails is left out and counted."""

    def __init__(self, read: Callable[[], Snapshot], max_series: int, on_failure: OnFailure) -> None:
        self._read = read
        self._exposure = Exposure(max_series)
        self._on_failure = on_failure

    def families(self, sections: Collection[Section]) -> tuple[Snapshot, list[Family]]:
        """The snapshot that was read, and its families of these sections in the order of the catalogue."""
        snapshot = self._read()
        view = self._view(snapshot)
        found = {spec: family for spec in CATALOG if (family := self._family(spec, view)) is not None}
        if SERIES in found:
            exposed = float(sum(family.size for family in found.values()) + 1)
            found[SERIES] = Family(SERIES, found[SERIES].labels, Rows([()], [exposed]))
        return snapshot, [family for spec, family in found.items() if spec.section in sections]

    def _view(self, snapshot: Snapshot) -> View:
        try:
            return self._exposure.view(snapshot)
        except Exception as error:
            self._on_failure(PART, error)
            return View(snapshot=snapshot, layers=LayerTable(), layer_totals=LayerTable())

    def _family(self, spec: MetricSpec, view: View) -> Family | None:
        try:
            names = (*IDENTITY_LABELS, *label_names(spec, view))
            histogram = view.snapshot.gradient_norms if spec.kind is Kind.HISTOGRAM else None
            return Family(spec, names, Rows.of(spec.read(view)), histogram)
        except Exception as error:
            self._on_failure(PART, error)
            return None


class PrometheusCollector(Collector):
    """A collector over one snapshot a scrape, for a registry of the user's own.

    ``read`` returns the latest Snapshot; registering never calls it.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        max_series: int = 2000,
        *,
        sections: Collection[Section] = tuple(Section),
        on_failure: OnFailure = log_failure,
    ) -> None:
        self._source = Source(read, max_series, on_failure)
        self._sections = sections

    def describe(self) -> Iterator[Metric]:
        """Every family without samples, so that a registry knows the names."""
        for spec in CATALOG:
            if spec.section in self._sections:
                yield Metric(spec.base_name, spec.help, spec.kind.value, spec.unit.value[0])

    def collect(self) -> Iterator[Metric]:
        """Every family with the readings of the latest snapshot."""
        snapshot, families = self._source.families(self._sections)
        who = (snapshot.identity.run_id, str(snapshot.identity.rank))
        for family in families:
            yield _filled(family, who)


def _filled(family: Family, who: tuple[str, str]) -> Metric:
    spec = family.spec
    if family.histogram is not None:
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=family.labels)
        buckets = zip(map(bound_text, family.histogram.bounds), map(float, family.histogram.counts), strict=True)
        histogram.add_metric(who, list(buckets), family.histogram.sum)
        return histogram
    kind = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(spec.base_name, spec.help, labels=family.labels, unit=spec.unit.value[0])
    for values, reading in family.samples:
        metric.add_metric((*who, *values), reading)
    return metric


def bound_text(bound: float) -> str:
    """An upper bound as the value of ``le``, in the canonical form of OpenMetrics."""
    if math.isinf(bound):
        return "+Inf"
    text = f"{bound:g}"
    return text if "." in text or "e" in text else text + ".0"
