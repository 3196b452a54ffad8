"""The HTTP endpoint of one process: its port, its one thread, its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable

from gradexporter.config import GradexporterError
from gradexporter.records import Snapshot
from gradexporter.sinks.prometheus.collector import PART, OnFailure, log_failure
from gradexporter.sinks.prometheus.connection import Connection, Limits, Pace, Peers
from gradexporter.sinks.prometheus.pages import Pages

_log = logging.getLogger("gradexporter")

ALTERNATES = 256
"""Ports that are tried after a taken one."""

SEND_BYTES = 262144
"""What the kernel may hold for a peer that does not read; by itself it would grow to megabytes each."""

JOIN_SECONDS = 5.0
"""How long ``close`` waits for the thread; it never takes more than an answer, but nothing may hang an exit."""


class EndpointError(GradexporterError):
    """The endpoint cannot be opened; the text says why and what to do."""


class Endpoint:
    """Serves the latest snapshot over HTTP from ``start()`` to ``close()``.

    ``read`` returns the latest Snapshot and is called from the endpoint's thread. Port 0 is any free
    port; a taken one moves on to the first free port from ``first_alternate`` upwards.
    ``on_failure`` is told of every fault of ours, as part ``endpoint``; it never reaches a peer or the caller.
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
        self._read = read
        self._host = host
        self._wanted = port
        self._first_alternate = port + 1 if first_alternate is None else first_alternate
        self._max_series = max_series
        self._on_failure = on_failure
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._port: int | None = None
        self._serving: _Serving | None = None

    @property
    def port(self) -> int:
        """The port that is served, or was until ``close()``."""
        if self._port is None:
            raise EndpointError("the endpoint has no port yet; call start() first")
        return self._port

    @property
    def url(self) -> str:
        """Address of the landing page, without a slash at its end."""
        host = "localhost" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def scrape_gap(self) -> float | None:
        """Longest pause in seconds between the last few scrapes; None when nobody scrapes regularly."""
        serving = self._serving
        return None if serving is None else serving.pages.visits.gap

    def start(self) -> Endpoint:
        """Binds the port and serves; raises EndpointError if no port can be had."""
        with self._lock:
            if self._serving is None:
                listener = self._bind()
                self._port = int(listener.getsockname()[1])
                pages = Pages(self._read, self._max_series, self._on_failure)
                try:
                    self._serving = _Serving(listener, pages, self._limits, self._on_failure)
                except (OSError, RuntimeError) as error:
                    listener.close()
                    raise EndpointError(
                        f"cannot start the endpoint's thread: {error}; raise the process limits"
                    ) from error
                _open.add(self)
        return self

    def close(self) -> None:
        """Stops serving; afterwards thread, sockets and port are free. May be called again."""
        with self._lock:
            serving, self._serving = self._serving, None
            _open.discard(self)
        if serving is not None:
            serving.stop()

    def abandon(self) -> None:
        """In a forked child: gives up the inherited port, which stays the parent's alone.

        Forking does this by itself; calling it again does nothing.
        """
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.listener.close()

    def _bind(self) -> socket.socket:
        alternates = range(self._first_alternate, min(self._first_alternate + ALTERNATES, 65536))
        for port in (self._wanted, *(alternates if self._wanted else ())):
            try:
                listener = _listen(self._host, port, self._limits.backlog)
            except (OSError, OverflowError, UnicodeError) as error:
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    continue
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise EndpointError(
                    f"cannot listen on {self._host!r}, port {port}: {why}; give host= an address of this machine "
                    "and port= a number from 1024 to 65535, or 0 for any free port"
                ) from error
            if port != self._wanted:
                _log.warning("gradexporter: port %d is taken; serving on port %d instead", self._wanted, port)
            return listener
        raise EndpointError(
            f"port {self._wanted} is taken, and so are {alternates.start} to {alternates.stop - 1}; "
            "give port= a free one, or 0 for any"
        )


class _Serving:
    """A bound port and the thread that answers on it."""

    def __init__(self, listener: socket.socket, pages: Pages, limits: Limits, on_failure: OnFailure) -> None:
        self.listener = listener
        self.pages, self._limits, self._on_failure = pages, limits, on_failure
        self._stopping = asyncio.Event()
        # Not asyncio.new_event_loop(): the user's policy may make loops of another kind.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="gradexporter-endpoint", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended and the sockets are closed."""
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:
            return  # the loop is closed: the thread has ended by itself
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.set_exception_handler(lambda _, context: self._on_failure(PART, _fault(context)))
            self._loop.run_until_complete(self._until_stopped())
        except Exception as error:
            self._on_failure(PART, error)
        finally:
            self.listener.close()
            self._loop.close()

    async def _until_stopped(self) -> None:
        peers = Peers(
            loop=self._loop,
            answer=self.pages.answer,
            limits=self._limits,
            pace=Pace(self._limits.cpu_share, self._limits.cpu_burst_seconds),
            on_failure=self._on_failure,
        )
        server = await self._loop.create_server(
            lambda: Connection(peers), sock=self.listener, backlog=self._limits.backlog
        )
        await self._stopping.wait()
        self._loop.remove_reader(self.listener)
        accepting = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*accepting, return_exceptions=True)  # asyncio leaks one that is half accepted at close
        server.close()
        for connection in list(peers.open):
            connection.cut()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=both)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # each connection inherits it
    return listener


def _fault(context: dict[str, object]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _in_forked_child() -> None:
    """The child has no serving thread, but its copy of the socket would keep the port taken after the parent."""
    for endpoint in list(_open):
        endpoint.abandon()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
