"""Peers of an endpoint over real sockets, and the states that they are shown."""

from __future__ import annotations

import http.client
import math
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from fakes import Failures

from gradexporter.records import Identity, LayerStats, LayerTable, SelfStats, Snapshot, StepReport
from gradexporter.sinks.prometheus import Endpoint
from gradexporter.tally import Tally

HOST = "127.0.0.1"


def quiet() -> Snapshot:
    return Tally(Identity(run_id="run-1"), clock=lambda: 100.0).snapshot


def stepped(layers: int = 1, **fields: object) -> Snapshot:
    tally = Tally(Identity(run_id="<run>"), clock=lambda: 100.0)
    rows = [LayerStats(layer=f"layer.{index}", gradient_norm=1.5) for index in range(layers)]
    report = StepReport(step=7, loss=math.nan, gradient_norm=2.5, layers=LayerTable.from_rows(rows), **fields)  # type: ignore[arg-type]
    return tally.add(report, SelfStats())


Serve = Callable[..., Endpoint]


def endpoints(failures: Failures) -> Iterator[Serve]:
    """The body of a fixture: starts endpoints on free ports, and closes them."""
    opened: list[Endpoint] = []
    before = serving_threads()

    def start(read: Callable[[], Snapshot] = quiet, **settings: object) -> Endpoint:
        settings = {"host": HOST, "on_failure": failures, **settings}
        opened.append(Endpoint(read, **settings).start())  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for endpoint in opened:
        endpoint.close()
    assert serving_threads() <= before


def serving_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "gradexporter-endpoint"}


@contextmanager
def connected(endpoint: Endpoint, seconds: float = 10.0) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, endpoint.port), timeout=seconds) as peer:
        yield peer


def get(endpoint: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with closing(http.client.HTTPConnection(HOST, endpoint.port, timeout=10)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


def until_closed(peer: socket.socket) -> bytes:
    received = b""
    try:
        while data := peer.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def reset(peer: socket.socket) -> bool:
    """Waits, without reading, until the other side has given up."""
    poll = select.poll()
    poll.register(peer, select.POLLHUP)
    return bool(poll.poll(10_000))


def exchanged(endpoint: Endpoint, request: bytes) -> bytes:
    with connected(endpoint) as peer:
        peer.sendall(request)
        return until_closed(peer)
