"""What each path of the endpoint answers."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from itertools import pairwise

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_latest_openmetrics
from prometheus_client.registry import Collector

from gradexporter import __version__
from gradexporter.metrics import Section
from gradexporter.records import Snapshot, to_plain
from gradexporter.sinks.prometheus.collector import PART, OnFailure, Source
from gradexporter.sinks.prometheus.http import Answer, Request
from gradexporter.sinks.prometheus.render import Format, Renderer, number_text

METRICS_PATHS = {
    "/metrics": tuple(Section),
    "/metrics/core": tuple(section for section in Section if section is not Section.LAYER),
    "/metrics/layers": (Section.LAYER,),
}
"""Sections of the catalogue by path; core and layers together are all, for two scrape intervals."""

PATHS = {
    "/metrics": "every series",
    "/metrics/core": "series of the run, without those of layers",
    "/metrics/layers": "series of layers alone",
    "/api/v1/report": "the last step as JSON",
    "/-/healthy": "200 while the endpoint serves",
    "/-/ready": "200 while there is something to scrape",
}
"""What the landing page says about each path."""


RECENT_SECONDS = 300.0
"""A scraper that has not come for so long is gone."""


class Visits:
    """When the run was scraped; written by the endpoint's thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: tuple[float, ...] = ()

    def note(self) -> None:
        """A scrape was answered."""
        self._times = (*self._times[-4:], self._clock())

    @property
    def gap(self) -> float | None:
        """Longest pause in seconds between the last few scrapes; None when nobody scrapes regularly."""
        times = self._times
        if len(times) < 3 or self._clock() - times[-1] > RECENT_SECONDS:
            return None
        return max(after - before for before, after in pairwise(times))


class Pages:
    """Answers requests from the latest snapshot; used by one thread."""

    def __init__(self, read: Callable[[], Snapshot], max_series: int, on_failure: OnFailure) -> None:
        self._read = read
        self._source = Source(read, max_series, on_failure)
        self._renderer = Renderer()
        self._process = _process_registry(on_failure)
        self.visits = Visits()

    def answer(self, request: Request) -> Answer:
        """The answer to this request; every path knows GET and HEAD."""
        path = request.path
        if path != "/" and path not in PATHS:
            return Answer(body=b"not found; the page at / lists the paths\n", status=HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return Answer(
                body=b"only GET and HEAD\n", status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"}
            )
        if path in METRICS_PATHS:
            if path != "/metrics/layers":
                self.visits.note()
            return self._metrics(METRICS_PATHS[path], request.format)
        if path == "/api/v1/report":
            return self._report()
        if path == "/":
            return self._landing()
        if path == "/-/ready":
            self._read()
        return Answer(body=b"ok\n")

    def _metrics(self, sections: Collection[Section], format: Format) -> Answer:
        snapshot, families = self._source.families(sections)
        pieces = self._renderer.render(snapshot.identity, families, format)
        registry = self._process if Section.SELF in sections else _EMPTY
        generate = generate_latest if format is Format.TEXT else generate_latest_openmetrics
        return Answer(
            body=b"".join([*pieces, generate(registry)]),
            content_type=format.value,
            headers={"Vary": "Accept, Accept-Encoding"},
        )

    def _report(self) -> Answer:
        report = self._read().report
        if report is None:
            return _json({"error": "no step has closed yet"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return _json(to_plain(report), HTTPStatus.OK)

    def _landing(self) -> Answer:
        table = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>\n" for name, value in self._now())
        links = "".join(f'<li><a href="{path}">{path}</a>: {_text(says)}</li>\n' for path, says in PATHS.items())
        page = _PAGE.format(version=_text(__version__), table=table, links=links)
        return Answer(
            body=page.encode(errors="replace"),
            content_type="text/html; charset=utf-8",
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    def _now(self) -> Iterable[tuple[str, object]]:
        snapshot = self._read()
        report, identity = snapshot.report, snapshot.identity
        yield "run", identity.run_id
        yield "rank", f"{identity.rank} of {identity.world_size}"
        if report is None:
            yield "state", "no step has closed yet"
            return
        yield "state", snapshot.state or "not judged"
        yield "step", report.step
        for name in ("loss", "gradient_norm", "gradient_spike_ratio"):
            value = getattr(report, name)
            yield name.replace("_", " "), "not observed" if value is None else number_text(float(f"{value:.6g}"))
        if report.last_healthy_step is not None:
            yield "last healthy step", report.last_healthy_step
        if report.diagnosis is not None:
            yield "diagnosis", f"{report.diagnosis.shape} since step {report.diagnosis.since_step}"
            for advice in report.diagnosis.advice:
                yield "what to do", advice
        if snapshot.ended is not None:
            yield "ended", snapshot.ended


def _text(value: object) -> str:
    return html.escape(str(value))


def _json(body: object, status: HTTPStatus) -> Answer:
    text = json.dumps(body, allow_nan=False) + "\n"
    return Answer(body=text.encode(), status=status, content_type="application/json")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>gradexporter</title>
<style>body {{ font-family: sans-serif; margin: 2em }} th {{ text-align: left; padding-right: 2em }}</style>
</head>
<body>
<h1>gradexporter {version}</h1>
<table>
{table}</table>
<ul>
{links}</ul>
</body>
</html>
"""

_EMPTY = CollectorRegistry()


class _Fenced(Collector):
    """A collector whose fault costs its own families, not the scrape."""

    def __init__(self, collector: Collector, on_failure: OnFailure) -> None:
        self._collector, self._on_failure = collector, on_failure

    def collect(self) -> Iterable[Metric]:
        try:
            return list(self._collector.collect())
        except Exception as error:
            self._on_failure(PART, error)
            return []


def _process_registry(on_failure: OnFailure) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        registry.register(_Fenced(collector(registry=CollectorRegistry()), on_failure))
    return registry
