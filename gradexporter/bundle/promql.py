"""PromQL from catalogue entries: a selector whose metric or label does not exist cannot be written."""

from __future__ import annotations

from collections.abc import Mapping

from gradexporter.metrics import IDENTITY_LABELS, Kind, MetricSpec

TARGET_LABELS = ("namespace", "pod", "container", "node", "job", "instance", "cluster")
"""Labels that Prometheus, not gradexporter, puts on a series."""

RUN = "namespace, run_id"
ATTEMPT = "namespace, run_id, attempt"


class Raw(str):
    """A matcher's right side, quotes included: ``Raw("%q")``, ``Raw('"$run"')``."""


class Pattern(str):
    """A matcher's value that is a regular expression: ``Pattern("$rank")``."""


Matcher = str | tuple[str, ...]

_NONE: Mapping[str, Matcher] = {}


def series(
    spec: MetricSpec, matchers: Mapping[str, Matcher] = _NONE, *, window: int | str | None = None, part: str = ""
) -> str:
    """The selector of a family.

    ``window`` is seconds, or a Grafana variable. ``part`` is ``bucket``, ``sum`` or ``count`` of a
    histogram. A tuple as a matcher's value stands for any of its members.
    """
    known = (*spec.labels, *IDENTITY_LABELS, *TARGET_LABELS, *(("le",) if part == "bucket" else ()))
    unknown = sorted(set(matchers) - set(known))
    assert not unknown, f"{spec.name} has no label {unknown}"
    assert bool(part) == (spec.kind is Kind.HISTOGRAM), f"{spec.name}: only a histogram has parts"
    name = f"{spec.name}_{part}" if part else spec.name
    inside = ", ".join(_matcher(label, value) for label, value in matchers.items())
    braces = f"{{{inside}}}" if inside else ""
    brackets = "" if window is None else f"[{window if isinstance(window, str) else duration(window)}]"
    return f"{name}{braces}{brackets}"


def _matcher(label: str, value: Matcher) -> str:
    if isinstance(value, Raw):
        return f"{label}={value}"
    if isinstance(value, Pattern):
        return f'{label}=~"{value}"'
    if isinstance(value, tuple):
        return f'{label}=~"{"|".join(value)}"'
    return f'{label}="{value}"'


def duration(seconds: int) -> str:
    """Seconds as Prometheus writes them: ``10m``, ``90s``, ``1h``."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
