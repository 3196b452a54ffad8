"""The fence between our faults and the user's run: counted by part, logged once, never raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("hooks", "observe", "readback", "judge", "publish", "endpoint", "close")
"""Where a fault of ours can happen; each has its series from the start."""

_log = logging.getLogger("gradexporter")


class Fence:
    """Counts what went wrong by part; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = dict.fromkeys(PARTS, 0)

    @property
    def failures(self) -> dict[str, int]:
        """Faults so far, by part."""
        return dict(self._failures)

    def record(self, part: str, error: BaseException | str) -> None:
        """Counts a fault; the first of each part is logged with its traceback."""
        with self._lock:
            self._failures[part] = self._failures.get(part, 0) + 1
            first = self._failures[part] == 1
        if first:
            trace = error if isinstance(error, BaseException) else None
            _log.warning(
                "gradexporter: %s failed and goes on being counted; training is not affected: %s",
                part,
                error if trace is None else repr(error),
                exc_info=trace,
            )

    @contextmanager
    def guarding(self, part: str) -> Iterator[None]:
        """Swallows and counts an Exception of the block."""
        try:
            yield
        except Exception as error:
            self.record(part, error)
