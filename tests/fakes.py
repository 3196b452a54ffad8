"""Stand-ins that tests pass in where the product takes a clock or somebody to tell of a fault."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Failures:
    """Takes what a fence would take, and keeps it; any thread may call it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._told = threading.Event()

    def __call__(self, part: str, error: BaseException) -> None:
        self.seen.append((part, repr(error)))
        self._told.set()

    def wait(self, seconds: float = 5.0) -> bool:
        """Waits for the first one."""
        return self._told.wait(seconds)
