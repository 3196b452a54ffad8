"""Peers that are wrong, slow, many or hostile: each is bounded, and nobody else waits."""

from __future__ import annotations

import concurrent.futures
import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from fakes import Failures, FakeClock
from peers import HOST, Serve, connected, endpoints, exchanged, get, reset, serving_threads, stepped, until_closed

from gradexporter.sinks.prometheus import Limits
from gradexporter.sinks.prometheus.connection import Pace
from gradexporter.sinks.prometheus.http import BadRequest, parse

HASTY = Limits(head_seconds=0.3, write_seconds=0.3, idle_seconds=0.3, linger_seconds=0.3)


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def serve(failures: Failures) -> Iterator[Serve]:
    yield from endpoints(failures)


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
    threads = serving_threads()
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        bodies = list(pool.map(lambda _: get(endpoint, "/metrics/layers")[1], range(50)))

    assert len(set(bodies)) == 1
    assert b"gradexporter_layer_gradient_norm{" in bodies[0]
    assert serving_threads() <= threads


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
