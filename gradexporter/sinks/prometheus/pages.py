"""What each path of the endpoint answers."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_latest_openmetrics
from prometheus_client.registry import Collector

from gradexporter import __version__
from gradexporter.metrics import Section
from gradexporter.records import Snapshot, to_plain
from gradexporter.sinks.prometheus.collector import PART, OnFailure, Source
from gradexporter.sinks.prometheus.http import Answer, Request
from gradexporter.sinks.prometheus.render import Format, Renderer, number_text

_log = logging.getLogger("gradexporter")

METRICS_PATHS = {
    "/metrics": tuple(Section),
    "/metrics/core": tuple(section for section in Section if section is not Section.LAYER),
    "/metrics/layers": (Section.LAYER,),
}
"""Sections of the catalogue by path; those without layers can be scraped more often."""

OTHER_PATHS = {
    "/api/v1/report": "the last step as JSON",
    "/-/healthy": "200 while the endpoint serves",
    "/-/ready": "200 while the endpoint serves",
}


class Pages:
    """Answers requests from the latest snapshot; used by one thread."""

    def __init__(self, read: Callable[[], Snapshot], max_series: int, on_failure: OnFailure) -> None:
        self._read = read
        self._source = Source(read, max_series, on_failure)
        self._renderer = Renderer()
        self._process = _process_registry(on_failure)

    def answer(self, request: Request) -> Answer:
        """The answer to this request; every path knows GET and HEAD."""
        path = request.path
        if path != "/" and path not in METRICS_PATHS and path not in OTHER_PATHS:
            return Answer(body=b"not found; the page at / lists the paths\n", status=HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return Answer(
                body=b"only GET and HEAD\n", status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"}
            )
        if path in METRICS_PATHS:
            return self._metrics(METRICS_PATHS[path], request.format)
        if path == "/api/v1/report":
            return self._report()
        if path == "/":
            return self._landing()
        return Answer(body=b"ok\n")

    def _metrics(self, sections: Iterable[Section], format: Format) -> Answer:
        wanted = tuple(sections)
        snapshot, families = self._source.families(wanted)
        body = self._renderer.render(snapshot.identity, families, format).encode()
        process = self._process if Section.SELF in wanted else CollectorRegistry()
        generate = generate_latest if format is Format.TEXT else generate_latest_openmetrics
        return Answer(
            body=body + generate(process),
            content_type=format.value,
            headers={"Vary": "Accept, Accept-Encoding"},
        )

    def _report(self) -> Answer:
        report = self._read().report
        if report is None:
            body, status = {"error": "no step has closed yet"}, HTTPStatus.SERVICE_UNAVAILABLE
        else:
            body, status = to_plain(report), HTTPStatus.OK
        text = json.dumps(body, allow_nan=False) + "\n"
        return Answer(body=text.encode(), status=status, content_type="application/json")

    def _landing(self) -> Answer:
        snapshot = self._read()
        report = snapshot.report
        rows = {
            "run": snapshot.identity.run_id,
            "rank": str(snapshot.identity.rank),
            "state": str(snapshot.state or "no step yet"),
            "step": "" if report is None else str(report.step),
            "loss": "" if report is None or report.loss is None else number_text(report.loss),
            "gradient norm": ""
            if report is None or report.gradient_norm is None
            else number_text(report.gradient_norm),
        }
        table = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>\n" for name, value in rows.items())
        links = "".join(f'<li><a href="{path}">{path}</a></li>\n' for path in (*METRICS_PATHS, *OTHER_PATHS))
        text = _PAGE.format(version=html.escape(__version__), table=table, links=links)
        return Answer(body=text.encode(), content_type="text/html; charset=utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>gradexporter</title></head>
<body>
<h1>gradexporter {version}</h1>
<table>
{table}</table>
<ul>
{links}</ul>
</body>
</html>
"""


class _Fenced(Collector):
    """A collector whose fault costs its own families, not the scrape."""

    def __init__(self, collector: Collector, on_failure: OnFailure) -> None:
        self._collector, self._on_failure = collector, on_failure

    def describe(self) -> list[object]:
        return []

    def collect(self):  # type: ignore[no-untyped-def]
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
