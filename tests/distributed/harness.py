"""Processes that form a gloo group, started once a session and used by many checks.

A check is a function of a test module. ``Ranks.run`` calls it in every process at once and returns what each rank
returned::

    def sums(ranks):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    def test_a_sum(two_ranks):
        assert two_ranks.run(sums, two_ranks.size) == [2.0, 2.0]

Function, arguments and results are pickled. A rank that raises, dies or hangs is a failed test that shows the
traceback of every rank; the processes are ended then, and the next check starts new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradexporter
from gradexporter.monitor import Monitor

CHECK_SECONDS = 120.0
"""How long one check may take; on a busy machine most of it is waiting for a processor."""

GRACE_SECONDS = 10.0
"""How long the others may go on after a rank failed: usually they wait for it in a collective."""

_HOST = "127.0.0.1"


# -- in the test's process --------------------------------------------------------------------------


class RankError(AssertionError):
    """What went wrong in the ranks, each with its traceback."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    log: Path
    answer: Any = None


class Ranks:
    """A group of processes on this machine, as torchrun would start them."""

    def __init__(self, size: int, folder: Path) -> None:
        """``folder`` takes what the processes write to stdout and stderr."""
        self.size = size
        self._folder = folder
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._checks = 0
        self._starts = 0

    def run(
        self, check: Callable[..., Any], *args: Any, grouped: bool = True, timeout: float = CHECK_SECONDS
    ) -> list[Any]:
        """What ``check(*args)`` returned on each rank.

        With ``grouped=False`` there is no process group, and the check may make one with ``join_group``.
        """
        if not self._workers:
            self._start()
        self._checks += 1
        order = pickle.dumps((check, args, grouped, self._checks))
        for worker in self._workers:
            worker.answer = None
            with suppress(OSError):  # a process that died meanwhile is found below
                worker.connection.send_bytes(order)
        self._gather(time.monotonic() + timeout)
        if any(worker.answer is None or not worker.answer[0] for worker in self._workers):
            story = self._story(getattr(check, "__name__", repr(check)), timeout)
            self.close()
            raise RankError(story)
        return [worker.answer[1] for worker in self._workers]

    def close(self) -> None:
        """Ends every process; a second call does nothing, and the next ``run`` starts anew."""
        for worker in self._workers:
            worker.connection.close()  # an idle process ends by itself
        deadline = time.monotonic() + 5.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers, self._store = [], None

    def _start(self) -> None:
        # The store lives here, on a port that the kernel chose: no race for a free one.
        self._store = dist.TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
        self._starts += 1
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            log = self._folder / f"start{self._starts}-rank{rank}.log"
            place = (rank, self.size, self._store.port, str(log))
            process = spawn.Process(target=_work, args=(theirs, *place), name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _gather(self, deadline: float) -> None:
        waiting = list(self._workers)
        while waiting and time.monotonic() < deadline:
            ready = wait([worker.connection for worker in waiting], max(0.0, deadline - time.monotonic()))
            for worker in [worker for worker in waiting if worker.connection in ready]:
                waiting.remove(worker)
                try:
                    worker.answer = pickle.loads(worker.connection.recv_bytes())
                except EOFError:
                    worker.process.join(5.0)
                if worker.answer is None or not worker.answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for worker in waiting:
            with suppress(OSError):
                os.kill(worker.process.pid, signal.SIGUSR1)  # writes where it stands
        if waiting:
            time.sleep(0.5)

    def _story(self, check: str, timeout: float) -> str:
        parts = [f"{check} failed"]
        for rank, worker in enumerate(self._workers):
            if worker.answer is not None:
                parts.append(f"-- rank {rank}: {'returned' if worker.answer[0] else worker.answer[1]}")
                continue
            code = worker.process.exitcode
            end = f"died with exit code {code}" if code is not None else f"did not answer (limit {timeout:g} s)"
            log = worker.log.read_text(errors="replace")[-8000:] if worker.log.exists() else ""
            parts.append(f"-- rank {rank}: {end}\n{log}")
        return "\n".join(parts)


# -- in the ranks -----------------------------------------------------------------------------------

_store: dist.Store | None = None


def rank() -> int:
    """This process among the ranks."""
    return int(os.environ["RANK"])


def join_group(name: str = "own") -> None:
    """Makes the default process group, on keys of the store that this check alone uses."""
    assert _store is not None
    store = dist.PrefixStore(name, _store)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=world, timeout=timedelta(seconds=60))
    dist.barrier()  # else a rank that is done may hang up on one that still connects


@contextmanager
def watching(*args: Any, **settings: Any) -> Iterator[Monitor]:
    """``gradexporter.watch`` without an endpoint unless asked for; closed at the end, when it must have no fault."""
    monitor = gradexporter.watch(*args, **{"serve": False, "activation_every": 1, "state_every": 1, **settings})
    try:
        yield monitor
        assert monitor.flush()
        snapshot = monitor.snapshot
        assert snapshot is None or not any(snapshot.itself.failures.values()), snapshot.itself.failures
    finally:
        monitor.close()


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that gradexporter logs meanwhile."""
    lines: list[str] = []

    class Listing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Listing()
    logger = logging.getLogger("gradexporter")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _work(connection: Connection, own_rank: int, size: int, port: int, log: str) -> None:
    _redirect(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    os.environ.update(
        RANK=str(own_rank),
        LOCAL_RANK=str(own_rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    server = dist.TCPStore(_HOST, port, size, is_master=False, timeout=timedelta(seconds=60))
    while True:
        answer = _answer(orders.get(), server)
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(data)


def _listen(connection: Connection, orders: queue.SimpleQueue[bytes]) -> None:
    """Takes orders; when the test's process closes the pipe or dies, this one ends wherever it hangs."""
    try:
        while True:
            orders.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(order: bytes, server: dist.Store) -> tuple[bool, Any]:
    global _store
    try:
        check, args, grouped, number = pickle.loads(order)
        _store = dist.PrefixStore(f"check{number}", server)
        if grouped and not dist.is_initialized():
            join_group("common")
        elif not grouped and dist.is_initialized():
            dist.destroy_process_group()
        torch.manual_seed(0)
        try:
            result = check(*args)
        finally:
            if not grouped and dist.is_initialized():
                dist.destroy_process_group()
        return True, result
    except BaseException:
        return False, traceback.format_exc()
    finally:
        gc.collect()


def _redirect(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


# -- fixtures -----------------------------------------------------------------------------------------


def started(size: int) -> Iterator[Ranks]:
    """The processes of a session; for a session fixture."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = Ranks(size, Path(folder))
        try:
            yield ranks
        finally:
            ranks.close()
