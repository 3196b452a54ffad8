"""One peer of the endpoint, and what it and all of them together may hold.

A connection has one timer and at most one answer under way, so that a slow, stuck or hostile peer
costs a socket until it is cut, never a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from gradexporter.sinks.prometheus.collector import PART, OnFailure
from gradexporter.sinks.prometheus.http import Answer, BadRequest, Request, parse, serialise


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one endpoint; times in seconds."""

    backlog: int = 128
    """Connections that wait in the kernel, so that a burst of scrapers is not refused."""
    connections: int = 200
    """Open connections; one more closes the one that has been idle longest."""
    in_flight: int = 40
    """Answers that are being written; one more request is told 503."""
    head_bytes: int = 16384
    """Longest request head."""
    head_seconds: float = 5.0
    """From the first byte of a request, or from the connection, to the end of its head."""
    write_seconds: float = 5.0
    """From an answer to its last byte leaving; the scrape timeout that Prometheus sends shortens it."""
    idle_seconds: float = 120.0
    """Between two requests of one connection; above the usual scrape intervals."""
    linger_seconds: float = 1.0
    """How long a closing connection reads on, so that its answer is not lost to a reset."""
    cpu_share: float = 0.1
    """Share of one core that answering may take for long; beyond it everybody waits, training does not."""
    cpu_burst_seconds: float = 0.5
    """CPU time that may be spent at once before the share counts."""


class Pace:
    """Holds a thread to a share of one core by putting it to sleep."""

    def __init__(
        self,
        share: float,
        burst_seconds: float,
        *,
        cpu: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._burst = share, burst_seconds
        self._cpu, self._clock, self._sleep = cpu, clock, sleep
        self._debt = 0.0
        self._cpu_before, self._clock_before = cpu(), clock()

    def keep(self) -> None:
        """Sleeps, at most a quarter of a second, if the thread has run more than its share."""
        cpu, clock = self._cpu(), self._clock()
        earned = self._share * (clock - self._clock_before)
        self._debt = max(0.0, self._debt - earned) + (cpu - self._cpu_before)
        self._cpu_before, self._clock_before = cpu, clock
        if self._debt > self._burst:
            self._sleep(min((self._debt - self._burst) / self._share, 0.25))


@dataclass(slots=True, kw_only=True)
class Peers:
    """What the connections of one endpoint share."""

    loop: asyncio.AbstractEventLoop
    answer: Callable[[Request], Answer]
    limits: Limits
    pace: Pace
    on_failure: OnFailure
    open: dict[Connection, None] = field(default_factory=dict)
    """Those that were idle longest come first."""


class Connection(asyncio.Protocol):
    """Reads a head, writes an answer, reads the next."""

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(self, peers: Peers) -> None:
        self._peers, self._limits = peers, peers.limits
        self._received = bytearray()
        self._last = False
        self._lingering = False
        self.writing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # "written" then means that the kernel has all of it
        self._timer = self._peers.loop.call_later(self._limits.head_seconds, self.cut)
        if len(self._peers.open) >= self._limits.connections:
            next((other for other in self._peers.open if not other.writing), self).cut()
        self._peers.open[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._peers.open.pop(self, None)

    def cut(self) -> None:
        """Ends the connection at once, whatever the peer still has to send or to read."""
        self._timer.cancel()
        self._peers.open.pop(self, None)
        peer = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            if self.writing:  # a reset, or the kernel would hold what the peer does not read
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.shutdown(socket.SHUT_RDWR)  # a forked child may hold the socket too: closing alone ends nothing
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._peers.pace.keep()
        if self._lingering:
            return
        if not self._received:
            self._wait(self._limits.head_seconds)
        self._received += data
        self._read()

    def pause_writing(self) -> None:
        self.writing = True

    def resume_writing(self) -> None:
        self.writing = False
        self._written()

    def _read(self) -> None:
        """Answers the next request if its head is complete."""
        if self.writing or self._transport.is_closing():
            return
        end = self._received.find(b"\r\n\r\n")
        if max(end, len(self._received) if end < 0 else 0) > self._limits.head_bytes:
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
        if sum(connection.writing for connection in self._peers.open) >= self._limits.in_flight:
            answer = Answer(
                body=b"too many requests in flight\n",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                headers={"Retry-After": "1"},
            )
        else:
            try:
                answer = self._peers.answer(request)
            except Exception as error:
                self._peers.on_failure(PART, error)
                answer = Answer(body=b"internal error\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        seconds = min(self._limits.write_seconds, request.scrape_timeout_seconds or self._limits.write_seconds)
        self._write(answer, request, seconds, last=not request.keep_alive)

    def _refuse(self, error: BadRequest) -> None:
        answer = Answer(body=f"{error}\n".encode(), status=error.status)
        self._write(answer, None, self._limits.write_seconds, last=True)

    def _write(self, answer: Answer, request: Request | None, seconds: float, *, last: bool) -> None:
        self._last = last
        self._transport.pause_reading()
        self._wait(seconds)
        self._transport.write(serialise(answer, request, close=last))
        if not self.writing:
            self._written()

    def _written(self) -> None:
        if self._last:
            self._linger()
            return
        self._peers.open[self] = self._peers.open.pop(self, None)
        self._wait(self._limits.head_seconds if self._received else self._limits.idle_seconds)
        self._transport.resume_reading()
        if self._received:
            self._peers.loop.call_soon(self._read)  # one answer a turn: a pipelining peer waits like all others

    def _linger(self) -> None:
        """Says goodbye and reads on: closing on unread data would reset the connection under the answer."""
        self._lingering = True
        self._received.clear()
        self._wait(self._limits.linger_seconds)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer has gone already
                self._transport.write_eof()

    def _wait(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._peers.loop.call_later(seconds, self.cut)
