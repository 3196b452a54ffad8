"""The endpoint over real sockets: what it answers, what it survives, what it leaves behind."""

from __future__ import annotations

import concurrent.futures
import gzip
import http.client
import json
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from fakes import Failures, FakeClock

from gradexporter.records import (
    Diagnosis,
    Identity,
    LayerStats,
    LayerTable,
    SelfStats,
    Severity,
    Shape,
    Snapshot,
    State,
    StepReport,
    to_plain,
)
from gradexporter.sinks.prometheus import Endpoint, EndpointError, Limits
from gradexporter.sinks.prometheus.connection import Pace
from gradexporter.sinks.prometheus.http import BadRequest, parse
from gradexporter.sinks.prometheus.render import Format
from gradexporter.tally import Tally

HOST = "127.0.0.1"
HASTY = Limits(head_seconds=0.3, write_seconds=0.3, idle_seconds=0.3, linger_seconds=0.3)


def quiet() -> Snapshot:
    return Tally(Identity(run_id="run-1"), clock=lambda: 100.0).snapshot


def stepped(layers: int = 1, **fields: object) -> Snapshot:
    tally = Tally(Identity(run_id="<run>"), clock=lambda: 100.0)
    rows = [LayerStats(layer=f"layer.{index}", gradient_norm=1.5) for index in range(layers)]
    report = StepReport(step=7, loss=math.nan, gradient_norm=2.5, layers=LayerTable.from_rows(rows), **fields)  # type: ignore[arg-type]
    return tally.add(report, SelfStats())


@pytest.fixture
def failures() -> Failures:
    return Failures()


Serve = Callable[..., Endpoint]


@pytest.fixture
def serve(failures: Failures) -> Iterator[Serve]:
    """Starts endpoints on free ports, and closes them."""
    opened: list[Endpoint] = []

    def start(read: Callable[[], Snapshot] = quiet, **settings: object) -> Endpoint:
        settings = {"host": HOST, "on_failure": failures, **settings}
        opened.append(Endpoint(read, **settings).start())  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for endpoint in opened:
        endpoint.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gradexporter-endpoint"]


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


# -- paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type", "end"),
    [
        (None, Format.TEXT.value, b"\n"),
        ("*/*", Format.TEXT.value, b"\n"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", Format.OPENMETRICS.value, b"# EOF\n"),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.5", Format.TEXT.value, b"\n"),
        ("application/openmetrics-text;version=9.0.0", Format.TEXT.value, b"\n"),
        ("application/openmetrics-text;q=nonsense", Format.TEXT.value, b"\n"),
    ],
)  # fmt: skip
def test_the_format_is_the_one_that_the_scraper_likes_best(
    serve: Serve, accept: str | None, content_type: str, end: bytes
) -> None:
    response, body = get(serve(), "/metrics", **({} if accept is None else {"accept": accept}))

    assert (response.status, response.headers["Content-Type"]) == (200, content_type)
    assert body.startswith(b"# HELP gradexporter_")
    assert body.endswith(end)
    assert (b"# EOF" in body) == (content_type == Format.OPENMETRICS.value)


@pytest.mark.parametrize(
    ("accept_encoding", "zipped"), [("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False)]
)
def test_a_scrape_is_gzipped_for_those_who_read_it(serve: Serve, accept_encoding: str, zipped: bool) -> None:
    response, body = get(serve(), "/metrics", accept_encoding=accept_encoding)

    assert (response.headers["Content-Encoding"] == "gzip") is zipped
    assert (gzip.decompress(body) if zipped else body).startswith(b"# HELP gradexporter_")


def test_layers_can_be_scraped_apart(serve: Serve) -> None:
    endpoint = serve(stepped)
    _, core = get(endpoint, "/metrics/core")
    _, layers = get(endpoint, "/metrics/layers")

    assert b"gradexporter_layer_gradient_norm{" in layers
    assert b"gradexporter_layer_" not in core
    assert b"gradexporter_step{" in core
    assert b"gradexporter_step{" not in layers


def test_probes_are_answered_and_a_state_that_cannot_be_read_is_not_ready(serve: Serve, failures: Failures) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("no state")

    assert [get(serve(), path)[0].status for path in ("/-/healthy", "/-/ready")] == [200, 200]
    assert [get(serve(broken), path)[0].status for path in ("/-/healthy", "/-/ready")] == [200, 500]
    assert failures.seen == [("endpoint", "RuntimeError('no state')")]


def test_the_report_is_the_last_step_as_json(serve: Serve) -> None:
    snapshot = stepped(state=State.SPIKE)
    response, body = get(serve(lambda: snapshot), "/api/v1/report")

    assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
    report = json.loads(body)
    assert report == to_plain(snapshot.report)
    assert (report["step"], report["loss"], report["state"]) == (7, "NaN", "spike")
    assert report["layers"][0]["layer"] == "layer.0"


def test_before_the_first_step_there_is_no_report_and_json_says_so(serve: Serve) -> None:
    response, body = get(serve(), "/api/v1/report")

    assert (response.status, json.loads(body)) == (503, {"error": "no step has closed yet"})


def test_the_landing_page_links_every_path_and_shows_the_run(serve: Serve) -> None:
    diagnosis = Diagnosis(
        shape=Shape.BAD_BATCH, severity=Severity.WARNING, since_step=6, advice=("look at <batch> & labels",)
    )
    response, body = get(serve(lambda: stepped(state=State.SPIKE, diagnosis=diagnosis, last_healthy_step=5)), "/")
    page = body.decode()

    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    for path in ("/metrics", "/metrics/core", "/metrics/layers", "/api/v1/report", "/-/healthy", "/-/ready"):
        assert f'<a href="{path}">' in page
    assert "<tr><th>run</th><td>&lt;run&gt;</td></tr>" in page
    assert "<tr><th>state</th><td>spike</td></tr>" in page
    assert "<tr><th>step</th><td>7</td></tr>" in page
    assert "<tr><th>loss</th><td>NaN</td></tr>" in page
    assert "<tr><th>gradient norm</th><td>2.5</td></tr>" in page
    assert "bad_batch since step 6" in page
    assert "look at &lt;batch&gt; &amp; labels" in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_landing_page_is_there_before_the_first_step(serve: Serve) -> None:
    response, body = get(serve(), "/")

    assert response.status == 200
    assert b"no step has closed yet" in body


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/report", "/", "/-/healthy"])
def test_head_says_what_get_would_and_sends_no_body(serve: Serve, path: str) -> None:
    endpoint = serve(stepped)
    head, nothing = get(endpoint, path, method="HEAD")
    whole, body = get(endpoint, path)

    assert (head.status, nothing) == (whole.status, b"")
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]
    assert abs(int(head.headers["Content-Length"]) - len(body)) < 50  # counters of the process move on


# -- what is no request for us ----------------------------------------------------------------------


def test_an_unknown_path_is_404_and_another_method_is_405(serve: Serve) -> None:
    endpoint = serve()
    assert get(endpoint, "/metric")[0].status == 404
    response, _ = get(endpoint, "/metrics", method="DELETE")
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_a_query_and_an_escape_in_the_path_are_understood(serve: Serve) -> None:
    assert get(serve(), "/%6detrics?name[]=up")[0].status == 200


def test_a_body_is_not_taken_for_the_next_request(serve: Serve) -> None:
    smuggled = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    request = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled) + smuggled

    answer = exchanged(serve(), request)

    assert answer.startswith(b"HTTP/1.1 405 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_does_not_reset_the_answer(serve: Serve) -> None:
    response, _ = get(serve(), "/metrics", method="POST", content_length="0")
    assert response.status == 405
    with closing(http.client.HTTPConnection(HOST, serve().port, timeout=10)) as connection:
        connection.request("POST", "/metrics", body=b"x" * 300_000)
        assert connection.getresponse().status == 405


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET //[ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nFill: " + b"x" * 20_000, 431),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nFill: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(
    serve: Serve, failures: Failures, request_head: bytes, status: int
) -> None:
    answer = exchanged(serve(), request_head)

    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"Connection: close\r\n" in answer
    assert failures.seen == []


def test_repeated_headers_are_one_list() -> None:
    request = parse(b"GET / HTTP/1.1\r\nHost: x\r\nAccept-Encoding: br\r\naccept-encoding: gzip")

    assert request.headers["accept-encoding"] == "br, gzip"
    assert request.gzip


@pytest.mark.parametrize(
    ("header", "seconds"), [("10", 10.0), ("0", None), ("-1", None), ("soon", None), ("nan", None)]
)
def test_a_scrape_timeout_is_a_positive_number(header: str, seconds: float | None) -> None:
    head = f"GET / HTTP/1.1\r\nHost: x\r\nX-Prometheus-Scrape-Timeout-Seconds: {header}"
    assert parse(head.encode()).scrape_timeout_seconds == seconds


def test_the_parser_raises_nothing_but_its_own_error() -> None:
    for head in (
        b"",
        b"\x00",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1\r\n:",
        b"G\xe9T / HTTP/1.1",
        b"GET / HTTP/1.1\r\n\r",
    ):
        with pytest.raises(BadRequest):
            parse(head)


# -- connections ------------------------------------------------------------------------------------


def test_a_connection_is_kept_for_the_next_scrape(serve: Serve) -> None:
    with closing(http.client.HTTPConnection(HOST, serve().port, timeout=10)) as connection:
        sockets = set()
        for _ in range(3):
            connection.request("GET", "/metrics")
            assert connection.getresponse().read().startswith(b"# HELP")
            sockets.add(connection.sock)
    assert len(sockets) == 1


@pytest.mark.parametrize(
    "request_head",
    [b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"GET /-/healthy HTTP/1.0\r\n\r\n"],
    ids=["asked to", "HTTP/1.0"],
)
def test_a_connection_is_closed_where_the_peer_expects_it(serve: Serve, request_head: bytes) -> None:
    assert exchanged(serve(), request_head).endswith(b"ok\n")


def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    """Thousands in one packet: neither a deep stack nor one long turn."""
    many = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 400
    last = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    answer = exchanged(serve(), many + last)

    assert answer.count(b"HTTP/1.1 200 ") == 400
    assert answer.split(b"HTTP/1.1 ")[-1].startswith(b"404 ")


def test_a_request_may_come_byte_by_byte(serve: Serve) -> None:
    with connected(serve()) as peer:
        for byte in b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            peer.sendall(bytes([byte]))
        assert until_closed(peer).endswith(b"ok\n")


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_peer_that_stops_talking_is_cut(serve: Serve, sent: bytes) -> None:
    with connected(serve(limits=HASTY)) as peer:
        peer.sendall(sent)
        until_closed(peer)


def test_a_peer_that_does_not_read_is_cut_and_nobody_else_waits(serve: Serve, failures: Failures) -> None:
    snapshot = stepped(layers=30_000)
    endpoint = serve(lambda: snapshot, max_series=1_000_000, limits=HASTY)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(10)
        peer.connect((HOST, endpoint.port))
        peer.sendall(b"GET /metrics/layers HTTP/1.1\r\nHost: x\r\n\r\n")
        assert get(endpoint, "/-/healthy")[0].status == 200
        assert reset(peer)
    assert failures.seen == []


def test_a_scrape_timeout_shortens_the_patience(serve: Serve) -> None:
    snapshot = stepped(layers=30_000)
    endpoint = serve(lambda: snapshot, max_series=1_000_000, limits=Limits(write_seconds=600.0))
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(10)
        peer.connect((HOST, endpoint.port))
        peer.sendall(b"GET /metrics/layers HTTP/1.1\r\nHost: x\r\nX-Prometheus-Scrape-Timeout-Seconds: 0.2\r\n\r\n")
        assert reset(peer)


def test_a_request_above_the_limit_in_flight_is_told_so(serve: Serve) -> None:
    snapshot = stepped(layers=30_000)
    endpoint = serve(lambda: snapshot, max_series=1_000_000, limits=Limits(in_flight=1, write_seconds=600.0))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(10)
        slow.connect((HOST, endpoint.port))
        slow.sendall(b"GET /metrics/layers HTTP/1.1\r\nHost: x\r\n\r\n")
        slow.recv(1)  # the answer is under way
        response, _ = get(endpoint, "/metrics")

    assert (response.status, response.headers["Retry-After"]) == (503, "1")


def test_one_connection_too_many_closes_the_one_that_was_idle_longest(serve: Serve) -> None:
    endpoint = serve(limits=Limits(connections=2))
    with connected(endpoint) as oldest, connected(endpoint) as newer:
        newer.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert newer.recv(65536).endswith(b"ok\n")
        assert get(endpoint, "/-/healthy")[0].status == 200
        assert until_closed(oldest) == b""


def test_fifty_scrapers_at_once_are_all_served(serve: Serve) -> None:
    snapshot = stepped(layers=100)
    endpoint = serve(lambda: snapshot)
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        bodies = list(pool.map(lambda _: get(endpoint, "/metrics/layers")[1], range(50)))

    assert len(set(bodies)) == 1
    assert b"gradexporter_layer_gradient_norm{" in bodies[0]
    assert sum(thread.name == "gradexporter-endpoint" for thread in threading.enumerate()) == 1


def test_a_flood_is_held_to_a_share_of_one_core() -> None:
    """The endpoint's thread sleeps off what it has run too much; training keeps the core."""
    cpu, clock = FakeClock(0.0), FakeClock(0.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    pace = Pace(0.1, 0.5, cpu=cpu, clock=clock, sleep=sleep)
    for _ in range(50):
        cpu.advance(0.01)
        clock.advance(0.01)
        pace.keep()
    assert slept == [], "a burst is served at once"

    for _ in range(200):
        cpu.advance(0.01)
        clock.advance(0.01)
        pace.keep()
    assert max(slept) <= 0.25
    assert (cpu.now - 0.5) / clock.now == pytest.approx(0.1, rel=0.05)

    slept.clear()
    clock.advance(100)
    cpu.advance(0.4)
    pace.keep()
    assert slept == [], "after a rest a burst is free again"


def test_the_pace_is_kept_for_every_packet(serve: Serve) -> None:
    endpoint = serve(limits=Limits(cpu_share=0.01, cpu_burst_seconds=0.0))
    began = time.monotonic()
    for _ in range(5):
        get(endpoint, "/metrics")

    assert time.monotonic() - began > 0.1


# -- faults -----------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_500_is_counted_and_the_next_scrape_works(serve: Serve, failures: Failures) -> None:
    states: list[Callable[[], Snapshot]] = []

    def read() -> Snapshot:
        return states.pop()()

    def fail() -> Snapshot:
        raise ValueError("torn")

    endpoint = serve(read)
    states += [quiet, fail]
    response, body = get(endpoint, "/metrics")
    assert (response.status, body) == (500, b"internal error\n")
    assert get(endpoint, "/metrics")[0].status == 200
    assert failures.seen == [("endpoint", "ValueError('torn')")]


def test_a_fault_in_telling_of_a_fault_costs_one_connection(serve: Serve) -> None:
    def worse(part: str, error: BaseException) -> None:
        raise RuntimeError("nobody to tell")

    def read() -> Snapshot:
        raise ValueError("torn")

    endpoint = serve(read, on_failure=worse)
    with connected(endpoint) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert until_closed(peer) == b""
    assert get(endpoint, "/-/healthy")[0].status == 200


# -- ports ------------------------------------------------------------------------------------------


def taken_port() -> socket.socket:
    return socket.create_server((HOST, 0))


def test_a_taken_port_moves_on_to_the_alternates_and_says_so_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with taken_port() as taken, taken_port() as neighbour, caplog.at_level(logging.INFO, "gradexporter"):
        wanted, first = taken.getsockname()[1], neighbour.getsockname()[1]
        endpoint = serve(port=wanted, first_alternate=first)

        assert endpoint.port > first
        assert [record.getMessage() for record in caplog.records] == [
            f"gradexporter: port {wanted} is taken; serving on port {endpoint.port} instead"
        ]
        assert get(endpoint, "/-/healthy")[0].status == 200


def test_no_free_port_is_an_error_that_says_what_to_do() -> None:
    with taken_port() as taken:
        port = taken.getsockname()[1]
        endpoint = Endpoint(quiet, host=HOST, port=port, first_alternate=65536)
        with pytest.raises(EndpointError, match=f"port {port} is taken.*give port="):
            endpoint.start()
        endpoint.close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "x" * 300])
def test_an_address_that_is_not_ours_is_an_error_that_names_it(host: str) -> None:
    with pytest.raises(EndpointError, match=r"cannot listen on '.*'.*give host="):
        Endpoint(quiet, host=host, port=0).start()


def test_a_port_is_known_once_started_and_the_url_can_be_opened(serve: Serve) -> None:
    with pytest.raises(EndpointError, match="call start"):
        _ = Endpoint(quiet).port

    endpoint = serve()
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}"
    assert serve(host="0.0.0.0").url.startswith("http://localhost:")
    assert endpoint.start() is endpoint


def test_ipv6_is_served(serve: Serve) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    endpoint = serve(host="::1")
    assert endpoint.url == f"http://[::1]:{endpoint.port}"
    with socket.create_connection(("::1", endpoint.port), timeout=10) as peer:
        peer.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
        assert until_closed(peer).endswith(b"ok\n")

    both = serve(host="::")
    assert get(both, "/-/healthy")[0].status == 200, "all addresses include those of IPv4"


# -- the end ----------------------------------------------------------------------------------------


def test_close_ends_the_thread_frees_the_port_and_may_be_called_again(serve: Serve) -> None:
    endpoint = serve()
    port = endpoint.port
    with connected(endpoint) as idle, connected(endpoint) as waiting:
        waiting.sendall(b"GET /metr")
        endpoint.close()
        endpoint.close()
        assert (until_closed(idle), until_closed(waiting)) == (b"", b"")

    assert not [thread for thread in threading.enumerate() if thread.name == "gradexporter-endpoint"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=1)
    assert serve(port=port, first_alternate=65536).port == port


def test_close_right_after_start_does_not_hang() -> None:
    for _ in range(20):
        endpoint = Endpoint(quiet, host=HOST).start()
        endpoint.close()


def test_an_endpoint_can_be_started_again(serve: Serve) -> None:
    endpoint = serve()
    endpoint.close()
    endpoint.start()
    assert get(endpoint, "/-/healthy")[0].status == 200


def test_close_leaves_no_descriptor(serve: Serve) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        endpoint = Endpoint(quiet, host=HOST).start()
        get(endpoint, "/metrics")
        endpoint.close()

    assert len(os.listdir("/proc/self/fd")) == before


def test_close_from_its_own_thread_does_not_wait_for_itself(failures: Failures) -> None:
    """A monitor that is collected as garbage closes its endpoint on whatever thread that happens."""
    closed = threading.Event()
    holder: list[Endpoint] = []

    def read() -> Snapshot:
        holder[0].close()
        closed.set()
        return quiet()

    holder.append(Endpoint(read, host=HOST, on_failure=failures).start())
    with connected(holder[0]) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        until_closed(peer)
    assert closed.wait(5)
    assert failures.seen == []


def test_a_forked_child_does_not_keep_the_port(serve: Serve) -> None:
    """A data loader's worker that outlives the trainer would otherwise hold connections that nobody answers."""
    endpoint = serve()
    port = endpoint.port
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            endpoint.close()
            endpoint.abandon()
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x"
        assert get(endpoint, "/-/healthy")[0].status == 200, "the parent still serves"
        endpoint.close()
        again = Endpoint(quiet, host=HOST, port=port, first_alternate=65536).start()
        again.close()
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for pipe in (*ready, *done):
            os.close(pipe)
