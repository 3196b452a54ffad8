"""Families to bytes, in the two formats that Prometheus asks for.

``prometheus_client.generate_latest`` writes the same lines, but holds the GIL, and with it the training
loop, twelve times as long: here the text before each value is kept from scrape to scrape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

from gradexporter.metrics import Labels, MetricSpec, Rows, Unit
from gradexporter.records import Identity
from gradexporter.sinks.prometheus.collector import Family, bound_text


class Format(Enum):
    """An exposition format; the value is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Renderer:
    """Writes families as text; used by one thread."""

    def __init__(self) -> None:
        self._lines: dict[tuple[object, ...], _Lines] = {}

    def render(self, identity: Identity, families: Iterable[Family], format: Format) -> list[bytes]:
        """Pieces of the text of these families, without the end mark of OpenMetrics."""
        parts: list[bytes] = []
        for family in families:
            parts.append(_heading(family.spec, format))
            name, labels, histogram = family.spec.name, family.labels, family.histogram
            if histogram is None:
                parts.append(self._of(identity, name, labels).text(family.samples))
            else:
                buckets = Rows([(bound_text(bound),) for bound in histogram.bounds], [*map(float, histogram.counts)])
                count = Rows([()], [float(histogram.counts[-1]) if histogram.counts else 0.0])
                parts.append(self._of(identity, name + "_bucket", (*labels, "le")).text(buckets))
                parts.append(self._of(identity, name + "_count", labels).text(count))
                parts.append(self._of(identity, name + "_sum", labels).text(Rows([()], [histogram.sum])))
        return parts

    def _of(self, identity: Identity, name: str, labels: tuple[str, ...]) -> _Lines:
        key = (name, labels, identity.run_id, identity.rank)
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = _Lines(name, labels, (identity.run_id, str(identity.rank)))
        return lines


class _Lines:
    """Lines of one sample name, kept with a gap for each value."""

    def __init__(self, name: str, names: tuple[str, ...], identity: tuple[str, ...]) -> None:
        fixed = dict(zip(names, map(escaped, identity), strict=False))
        varying = names[len(identity) :]
        pairs = (f'{label}="{_literal(fixed[label]) if label in fixed else "%s"}"' for label in sorted(names))
        self._template = f"{name}{{{','.join(pairs)}}} "
        self._order = [varying.index(label) for label in sorted(varying)]
        self._labels: tuple[Labels, ...] = ()
        self._readings: Sequence[float] = ()
        self._pieces = [""]
        self._text = b""

    def text(self, rows: Rows) -> bytes:
        """The lines with these readings."""
        if rows.labels != self._labels:
            self._labels = rows.labels
            self._pieces = _with_gaps(map(self._prefix, rows.labels))
        elif rows.readings == self._readings:
            return self._text  # what is sampled, and most counters, is the same as a scrape ago
        self._readings = rows.readings
        self._pieces[1::2] = _texts(rows.readings)
        self._text = "".join(self._pieces).encode(errors="replace")  # an environment may hold what is no UTF-8
        return self._text

    def _prefix(self, values: Labels) -> str:
        return self._template % tuple([escaped(values[index]) for index in self._order])


def _with_gaps(prefixes: Iterable[str]) -> list[str]:
    """Prefix, gap, prefix, gap and so on; the end of a line goes with the prefix of the next."""
    pieces: list[str] = []
    for prefix in prefixes:
        pieces += [f"\n{prefix}" if pieces else prefix, ""]
    return [*pieces, "\n"] if pieces else [""]


def _literal(text: str) -> str:
    return text.replace("%", "%%")


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


def _texts(readings: Sequence[float]) -> list[str]:
    plain = math.isfinite(sum(readings)) and max(readings, default=0.0) < 1e6
    return list(map(repr if plain else number_text, readings))  # repr says the same in a third of the time


def _heading(spec: MetricSpec, format: Format) -> bytes:
    found = _HEADINGS.get((spec.name, format))
    if found is None:
        found = _HEADINGS[spec.name, format] = _heading_of(spec, format).encode()
    return found


_HEADINGS: dict[tuple[str, Format], bytes] = {}


def _heading_of(spec: MetricSpec, format: Format) -> str:
    help = spec.help.replace("\\", r"\\").replace("\n", r"\n")
    if format is Format.TEXT:
        return f"# HELP {spec.name} {help}\n# TYPE {spec.name} {spec.kind.value}\n"
    name = spec.base_name
    help = help.replace('"', r"\"")
    unit = "" if spec.unit is Unit.NONE else f"\n# UNIT {name} {spec.unit.value[0]}"
    return f"# HELP {name} {help}\n# TYPE {name} {spec.kind.value}{unit}\n"
