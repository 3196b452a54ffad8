"""The HTTP endpoint of one process: one thread, bounded in everything that a peer can make it hold.

It is written on asyncio's protocols: each connection has one timer and at most one answer under way,
so that a slow, stuck or hostile peer costs a socket until it is cut, never a thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from gradexporter.config import GradexporterError
from gradexporter.records import Snapshot
from gradexporter.sinks.prometheus.collector import PART, OnFailure, log_failure
from gradexporter.sinks.prometheus.http import Answer, BadRequest, Request, parse, serialise
from gradexporter.sinks.prometheus.pages import Pages

_log = logging.getLogger("gradexporter")

ALTERNATES = 256
"""Ports that are tried after a taken one."""


class EndpointError(GradexporterError):
    """The endpoint cannot be opened; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one peer, and all of them together, may hold."""

    backlog: int = 128
    """Connections that wait in the kernel; bursts of scrapers are not refused."""
    connections: int = 200
    """Open connections; above it the longest idle one is closed."""
    in_flight: int = 40
    """Answers that are being written; above it a request gets 503."""
    head_bytes: int = 16384
    """Longest request head."""
    head_seconds: float = 5.0
    """From the first byte of a request, or from the connection, to the end of its head."""
    write_seconds: float = 5.0
    """From the answer to the last of its bytes leaving; a scrape timeout sent by Prometheus shortens it."""
    idle_seconds: float = 120.0
    """Between requests on one connection; above the usual scrape intervals."""


class Endpoint:
    """Serves the latest snapshot over HTTP until closed.

    ``read`` returns the latest Snapshot and is called from the endpoint's thread. Port 0 is any free
    port; a taken one moves on to the first free port from ``first_alternate`` upwards.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        first_alternate: int | None = None,
        max_series: int = 2000,
        on_failure: OnFailure = log_failure,
        limits: Limits | None = None,
    ) -> None:
        self._host = host
        self._wanted = port
        self._first_alternate = port + 1 if first_alternate is None else first_alternate
        self._on_failure = on_failure
        self._limits = limits or Limits()
        self._pages = Pages(read, max_series, on_failure)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._port: int | None = None
        self._stopping = asyncio.Event()

    @property
    def port(self) -> int:
        """The port that is served; valid from ``start()`` on."""
        if self._port is None:
            raise EndpointError("the endpoint is not started; call start() first")
        return self._port

    @property
    def url(self) -> str:
        """Address of the landing page, without a slash at its end."""
        host = "localhost" if self._host in ("0.0.0.0", "::", "") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> Endpoint:
        """Binds the port and serves; raises EndpointError if no port can be had."""
        with self._lock:
            if self._listener is not None:
                return self
            self._listener = self._bind()
            self._port = int(self._listener.getsockname()[1])
            self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop, self._listener), name="gradexporter-endpoint", daemon=True
            )
            self._thread.start()
            _open.add(self)
        return self

    def close(self) -> None:
        """Stops serving; afterwards thread, sockets and port are free. May be called again."""
        with self._lock:
            listener, loop, thread = self._listener, self._loop, self._thread
            self._listener = self._loop = self._thread = None
        if listener is None or loop is None or thread is None:
            return
        _open.discard(self)
        loop.call_soon_threadsafe(self._stopping.set)
        if thread is not threading.current_thread():
            thread.join()

    def _bind(self) -> socket.socket:
        wanted = [self._wanted]
        if self._wanted:
            last = min(self._first_alternate + ALTERNATES, 65536)
            wanted += [port for port in range(self._first_alternate, last) if port != self._wanted]
        for port in wanted:
            try:
                listener = _listen(self._host, port, self._limits.backlog)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise EndpointError(
                    f"cannot listen on {self._host} port {port}: {error.strerror or error}; "
                    f"give host= an address of this machine and port= a number above 1023"
                ) from error
            if port != self._wanted:
                _log.warning("gradexporter: port %d is taken; metrics are served on port %d", self._wanted, port)
            return listener
        raise EndpointError(
            f"port {self._wanted} and ports {wanted[-1] - ALTERNATES + 1} to {wanted[-1]} are taken; "
            f"give port= a free one, or 0 for any"
        )

    def _serve(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        try:
            loop.set_exception_handler(lambda _, context: self._on_failure(PART, _fault(context)))
            loop.run_until_complete(self._until_closed(loop, listener))
        except Exception as error:
            self._on_failure(PART, error)
        finally:
            listener.close()
            loop.close()

    async def _until_closed(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        connections: dict[_Connection, None] = {}
        server = await loop.create_server(
            lambda: _Connection(loop, self._pages, self._limits, connections, self._on_failure),
            sock=listener,
            backlog=self._limits.backlog,
        )
        await self._stopping.wait()
        server.close()
        for connection in list(connections):
            connection.cut()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn


class _Connection(asyncio.Protocol):
    """One peer: reads a head, writes an answer, reads the next."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pages: Pages,
        limits: Limits,
        connections: dict[_Connection, None],
        on_failure: OnFailure,
    ) -> None:
        self._loop, self._pages, self._limits = loop, pages, limits
        self._connections, self._on_failure = connections, on_failure
        self._received = bytearray()
        self._closing = False
        self.writing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        self._timer = self._loop.call_later(self._limits.head_seconds, self.cut)
        if len(self._connections) >= self._limits.connections:
            idle = next((other for other in self._connections if not other.writing), None)
            if idle is not None:
                idle.cut()
        self._connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.pop(self, None)

    def cut(self) -> None:
        """Ends the connection at once, whatever the peer still has to read."""
        self._timer.cancel()
        self._connections.pop(self, None)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._wait(self._limits.head_seconds)
        self._received += data
        self._next()

    def pause_writing(self) -> None:
        self.writing = True

    def resume_writing(self) -> None:
        self.writing = False
        self._written()

    def _next(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end > self._limits.head_bytes or (end < 0 and len(self._received) > self._limits.head_bytes):
            self._refuse(BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request head is too long"))
        elif end >= 0:
            head = bytes(self._received[:end])
            del self._received[: end + 4]
            try:
                request = parse(head)
            except BadRequest as error:
                self._refuse(error)
            else:
                self._answer(request)

    def _answer(self, request: Request) -> None:
        busy = sum(connection.writing for connection in self._connections)
        if busy >= self._limits.in_flight:
            answer = Answer(
                body=b"too many requests in flight\n",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                headers={"Retry-After": "1"},
            )
        else:
            try:
                answer = self._pages.answer(request)
            except Exception as error:
                self._on_failure(PART, error)
                answer = Answer(body=b"internal error\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        seconds = min(self._limits.write_seconds, request.scrape_timeout_seconds or self._limits.write_seconds)
        self._write(serialise(answer, request, close=not request.keep_alive), seconds, close=not request.keep_alive)

    def _refuse(self, error: BadRequest) -> None:
        answer = Answer(body=f"{error}\n".encode(), status=error.status)
        self._write(serialise(answer, None, close=True), self._limits.write_seconds, close=True)

    def _write(self, data: bytes, seconds: float, *, close: bool) -> None:
        self._closing = close
        self._transport.pause_reading()
        self._wait(seconds)
        self._transport.write(data)
        if not self.writing:
            self._written()

    def _written(self) -> None:
        if self._closing:
            self._timer.cancel()
            self._connections.pop(self, None)
            self._transport.close()
            return
        self._connections[self] = self._connections.pop(self, None)
        self._transport.resume_reading()
        self._wait(self._limits.head_seconds if self._received else self._limits.idle_seconds)
        self._next()

    def _wait(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.cut)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def _fault(context: dict[str, object]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has no serving thread; its copy of the socket would keep the port taken."""
    for endpoint in list(_open):
        listener, endpoint._listener = endpoint._listener, None
        if listener is not None:
            listener.close()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
