"""The endpoint of a process: what its paths answer, its port, its faults, its end."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from fakes import Failures
from peers import HOST, Serve, connected, endpoints, get, quiet, serving_threads, stepped, until_closed

from gradexporter.records import Diagnosis, Severity, Shape, Snapshot, State, to_plain
from gradexporter.sinks.prometheus import Endpoint, EndpointError
from gradexporter.sinks.prometheus.render import Format


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def serve(failures: Failures) -> Iterator[Serve]:
    yield from endpoints(failures)


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
    threads = serving_threads()
    endpoint = serve()
    port = endpoint.port
    with connected(endpoint) as idle, connected(endpoint) as waiting:
        waiting.sendall(b"GET /metr")
        endpoint.close()
        endpoint.close()
        assert (until_closed(idle), until_closed(waiting)) == (b"", b"")

    assert serving_threads() <= threads
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
