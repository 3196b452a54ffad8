"""Families to bytes, in the two formats that Prometheus asks for.

``prometheus_client.generate_latest`` writes the same lines, but holds the GIL, and with it the training
loop, twelve times as long: here the text before each value is kept from scrape to scrape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from enum import Enum

from gradexporter.metrics import MetricSpec, Unit
from gradexporter.records import Identity
from gradexporter.sinks.prometheus.collector import Family, bound_text


class Format(Enum):
    """An exposition format; the value is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Renderer:
    """Writes families as text; used by one thread."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[object, ...], _Prefixes] = {}

    def render(self, identity: Identity, families: Iterable[Family], format: Format) -> str:
        """Lines of these families, without the end mark of OpenMetrics."""
        parts: list[str] = []
        for family in families:
            parts.append(_heading(family.spec, format))
            if family.histogram is not None:
                parts += self._histogram_lines(identity, family)
            elif family.samples:
                prefixes = self._prefixes_of(identity, family.spec.name, family.labels)
                labels, readings = zip(*family.samples, strict=True)
                parts += map(operator.add, map(prefixes.__getitem__, labels), _texts(readings))
        return "\n".join([*parts, ""])

    def _histogram_lines(self, identity: Identity, family: Family) -> list[str]:
        name, histogram = family.spec.name, family.histogram
        assert histogram is not None
        buckets = self._prefixes_of(identity, name + "_bucket", (*family.labels, "le"))
        lines = [
            buckets[(bound_text(bound),)] + number_text(count)
            for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
        ]
        for suffix, value in (("_count", histogram.counts[-1] if histogram.counts else 0), ("_sum", histogram.sum)):
            lines.append(self._prefixes_of(identity, name + suffix, family.labels)[()] + number_text(value))
        return lines

    def _prefixes_of(self, identity: Identity, name: str, labels: tuple[str, ...]) -> _Prefixes:
        key = (name, labels, identity.run_id, identity.rank)
        found = self._prefixes.get(key)
        if found is None:
            found = self._prefixes[key] = _Prefixes(name, labels, (identity.run_id, str(identity.rank)))
        return found


class _Prefixes(dict[tuple[str, ...], str]):
    """What stands before the value, by label values; made when first asked for."""

    def __init__(self, name: str, labels: tuple[str, ...], identity: tuple[str, ...]) -> None:
        self._name, self._labels, self._identity = name, labels, identity

    def __missing__(self, values: tuple[str, ...]) -> str:
        pairs = sorted(zip(self._labels, (*self._identity, *values), strict=True))
        text = ",".join(f'{label}="{escaped(value)}"' for label, value in pairs)
        self[values] = prefix = f"{self._name}{{{text}}} "
        return prefix


def escaped(text: str) -> str:
    """A label value between quotes."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number_text(value: float) -> str:
    """A reading as Go would print it: NaN, +Inf, 1e+06."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def _texts(readings: tuple[float, ...]) -> Iterable[str]:
    if all(map(math.isfinite, readings)) and max(readings) < 1e6:
        return map(repr, map(float, readings))
    return map(number_text, readings)


def _heading(spec: MetricSpec, format: Format) -> str:
    found = _HEADINGS.get((spec.name, format))
    if found is None:
        found = _HEADINGS[spec.name, format] = _heading_of(spec, format)
    return found


_HEADINGS: dict[tuple[str, Format], str] = {}


def _heading_of(spec: MetricSpec, format: Format) -> str:
    help = spec.help.replace("\\", r"\\").replace("\n", r"\n")
    if format is Format.TEXT:
        return f"# HELP {spec.name} {help}\n# TYPE {spec.name} {spec.kind.value}"
    name = spec.base_name
    help = help.replace('"', r"\"")
    unit = "" if spec.unit is Unit.NONE else f"\n# UNIT {name} {spec.unit.value[0]}"
    return f"# HELP {name} {help}\n# TYPE {name} {spec.kind.value}{unit}"
