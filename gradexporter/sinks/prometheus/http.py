"""As much of HTTP/1.1 as a scraper, a probe and a browser need: requests parsed, answers written."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

from gradexporter.sinks.prometheus.render import Format


class BadRequest(Exception):
    """The peer sent something that is no request for us."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request without a body."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case; repeated ones joined by a comma."""
    keep_alive: bool

    @property
    def gzip(self) -> bool:
        """Whether the peer reads gzip."""
        weights = _weights(self.headers.get("accept-encoding", ""))
        return any(weight > 0 for name, _, weight in weights if name == "gzip")

    @property
    def format(self) -> Format:
        """The exposition format that the peer likes best."""
        best, liked = Format.TEXT, 0.0
        for name, parameters, weight in _weights(self.headers.get("accept", "")):
            if name == "text/plain" and parameters.get("version", "0.0.4") == "0.0.4":
                format = Format.TEXT
            elif name == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
                format = Format.OPENMETRICS
            else:
                continue
            if weight > liked:
                best, liked = format, weight
        return best

    @property
    def scrape_timeout_seconds(self) -> float | None:
        """How long Prometheus says that it waits; None if it does not say."""
        try:
            seconds = float(self.headers.get("x-prometheus-scrape-timeout-seconds", ""))
        except ValueError:
            return None
        return seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a path has to say."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def parse(head: bytes) -> Request:
    """The request whose head, up to the empty line, is ``head``; raises BadRequest."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[0].isalpha() or not parts[2].startswith("HTTP/"):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the first line is no HTTP request line")
    method, target, version = parts
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(HTTPStatus.BAD_REQUEST, "a header line is no header")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if version == "HTTP/1.1" and "host" not in headers:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the Host header is missing")
    try:
        path = unquote(urlsplit(target).path)
    except ValueError:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the target is no path") from None
    return Request(method, path, headers, _keeps_alive(version, headers))


def serialise(answer: Answer, request: Request | None, *, close: bool) -> bytes:
    """The bytes of an answer; gzipped where the peer reads it, without the body for HEAD."""
    body = answer.body
    headers = {
        "Content-Type": answer.content_type,
        "Date": formatdate(usegmt=True),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close" if close else "keep-alive",
        **answer.headers,
    }
    if request is not None and request.gzip and len(body) >= GZIP_FROM_BYTES and "Content-Encoding" not in headers:
        body = gzipped(body)
        headers["Content-Encoding"] = "gzip"
    headers["Content-Length"] = str(len(body))
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    return head if request is not None and request.method == "HEAD" else head + body


GZIP_FROM_BYTES = 1024
"""Smaller bodies fit one packet anyway."""


def gzipped(body: bytes) -> bytes:
    """gzip at level 1: a fifth larger than level 9, in a fifteenth of its time."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(body) + packer.flush()


def _keeps_alive(version: str, headers: Mapping[str, str]) -> bool:
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return False  # the body is never read, so nothing after it can be understood
    options = {option.strip().lower() for option in headers.get("connection", "").split(",")}
    return "close" not in options if version == "HTTP/1.1" else "keep-alive" in options


def _weights(header: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, parameters and weight of each element of an Accept header."""
    found = []
    for element in header.split(","):
        name, *rest = element.split(";")
        parameters = {}
        for parameter in rest:
            key, _, value = parameter.partition("=")
            parameters[key.strip().lower()] = value.strip().strip('"')
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        found.append((name.strip().lower(), parameters, weight))
    return found
