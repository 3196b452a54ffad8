"""Interleaved pairs of blocks, with and without, on the same tensors in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contestants import Contestant
from models import Subject


@dataclass
class Spread:
    """A median and its 95 % interval, which follows from the order of the values alone."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered, count = sorted(values), len(values)
        reach = 0.98 * math.sqrt(count)
        first = max(0, int(count / 2 - reach))
        return cls(statistics.median(ordered), ordered[first], ordered[count - 1 - first])

    @property
    def noise(self) -> float:
        """How far from 1 the interval of a ratio reaches."""
        return max(abs(self.low - 1), abs(self.high - 1))


@dataclass
class Row:
    """What one contestant costs on one model, a step."""

    model: str
    contestant: str
    pairs: int
    steps: int
    """Steps of a block."""
    bare_ms: float
    """CPU time of the step without it."""
    self_ms: float | None
    """CPU time of its own on all its threads; None where that is not all of it."""
    self_share: float | None
    """The same as a share of the bare step."""
    process: Spread
    """CPU time of the process with it over that without it."""
    thread: Spread
    """The same of the thread that trains."""
    wall: Spread


@dataclass
class Effort:
    """How long one row may take."""

    least_pairs: int
    most_pairs: int
    block_seconds: float
    seconds: float
    """After which there are no more pairs than the least."""


def measure(
    subject: Subject,
    name: str,
    make: Callable[[Subject], Contestant],
    *,
    effort: Effort,
) -> Row:
    """Pairs of blocks, after one of single steps to warm up."""
    bare, contestant = Contestant(subject), make(subject)
    steps = _steps(bare, effort.block_seconds)
    steps = math.ceil(steps / contestant.steps_multiple) * contestant.steps_multiple
    base: list[float] = []
    own: list[float] = []
    ratios: tuple[list[float], ...] = ([], [], [])
    until = time.monotonic() + effort.seconds
    for pair in range(effort.most_pairs + 1):
        length = steps if pair else 1
        with_it, without = (), ()
        before = contestant.seconds
        for arm in ("with", "without") if pair % 2 else ("without", "with"):
            if arm == "with":
                contestant.attach()
                with_it = _block(contestant, length)
                contestant.detach()
            else:
                without = _block(bare, length)
        if not pair:
            continue
        base.append(without[1] / steps)
        own.append((contestant.seconds - before) / steps)
        for ratio, mine, theirs in zip(ratios, with_it, without, strict=True):
            ratio.append(mine / theirs)
        if pair >= effort.least_pairs and time.monotonic() > until:
            break
    contestant.close()
    bare_seconds, own_seconds = statistics.median(base), statistics.median(own)
    process, thread, wall = map(Spread.of, ratios)
    return Row(
        model=subject.name,
        contestant=name,
        pairs=len(base),
        steps=steps,
        bare_ms=bare_seconds * 1e3,
        self_ms=own_seconds * 1e3 if contestant.complete else None,
        self_share=own_seconds / bare_seconds if contestant.complete else None,
        process=process,
        thread=thread,
        wall=wall,
    )


def _block(contestant: Contestant, steps: int) -> tuple[float, float, float]:
    """CPU seconds of process and thread, and wall seconds, until everything of the block is done."""
    wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        contestant.step()
    contestant.settle()
    return time.process_time() - process, time.thread_time() - thread, time.perf_counter() - wall


def _steps(bare: Contestant, block_seconds: float) -> int:
    _block(bare, 1)
    return max(1, round(block_seconds / (_block(bare, 3)[1] / 3)))
