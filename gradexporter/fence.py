"""The fence between our faults and the user's run: counted by part, logged once, never raised."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

PARTS = ("hooks", "observe", "readback", "judge", "publish", "endpoint", "resume", "kernels", "close")
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
        """Counts a fault; the first of each part is logged with its traceback.

        Raises it again if it is none of ours: a signal handler of the user's (a time limit, a preemption notice)
        may raise wherever Python happens to be, and that is sometimes here.
        """
        if isinstance(error, BaseException) and _from_signal_handler(error):
            raise error
        if self.count(part) == 1:
            trace = error if isinstance(error, BaseException) else None
            _log.warning(
                "gradexporter: %s failed and goes on being counted; training is not affected: %s",
                part,
                error if trace is None else repr(error),
                exc_info=trace,
            )

    def count(self, part: str) -> int:
        """Counts a fault that was logged already; how many there were."""
        with self._lock:
            self._failures[part] = self._failures.get(part, 0) + 1
            return self._failures[part]

    @contextmanager
    def guarding(self, part: str) -> Iterator[None]:
        """Swallows and counts an Exception of the block."""
        try:
            yield
        except Exception as error:
            self.record(part, error)


def _from_signal_handler(error: BaseException) -> bool:
    handlers = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """Code of a Python signal handler; None of a default, ignored or native one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for candidate in (handler, vars(type(handler)).get("__call__")):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
