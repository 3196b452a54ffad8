"""Which kernels reduce tensors in this process: stock torch operations, or native ones as soon as there are any.

The library for main memory is found or built on a thread of its own; until it is there, and where it cannot be
had, stock operations do the same.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

import torch

from gradexporter.stats import compiler, device, native

Report = Callable[[str, BaseException], None]
"""Takes a fault of ours, as ``Fence.record`` does."""

STOP_SECONDS = 2.0
"""How long the last watch that ends waits for the thread, which only has to notice."""

_log = logging.getLogger("gradexporter")


class Kernels:
    """The choice of a process; any thread may call."""

    def __init__(self) -> None:
        self._library: native.Library | None = None
        self._unavailable: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._asked: weakref.WeakKeyDictionary[object, tuple[str, Report]] = weakref.WeakKeyDictionary()
        self._build: compiler.Build | None = None
        self._thread: threading.Thread | None = None
        self._warned = False

    def ask(self, owner: object, choice: str, report: Report) -> None:
        """``owner`` wants ``choice`` (auto, stock or native) until ``unask``; returns at once."""
        with self._lock:
            self._asked[owner] = (choice, report)
            self._settle()
            settled = self._library is not None or self._unavailable is not None or self._build is not None
            if choice == "stock" or settled:
                return
            build = self._build = compiler.Build()
            self._thread = threading.Thread(target=self._get, args=(build,), name="gradexporter-kernels", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads on this machine, or the interpreter is ending
                self._build, self._thread, self._unavailable = None, None, str(error)
                self._settle()

    def unask(self, owner: object) -> None:
        """Undoes ``ask``; with the last owner a build that is under way ends."""
        with self._lock:
            self._asked.pop(owner, None)
            self._settle()
            if self._asked:
                return
        self.stop()

    def stop(self) -> None:
        """Ends a build that is under way, and waits for its thread."""
        with self._lock:
            build, thread = self._build, self._thread
            self._build, self._thread = None, None
        if build is not None and thread is not None:
            build.stop()
            thread.join(STOP_SECONDS)

    def wait(self, timeout: float) -> bool:
        """Waits until it is clear whether there is a library; False if that took longer."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def in_use(self) -> dict[str, str]:
        """``stock`` or ``native``, by type of device."""
        found = {"cpu": "stock" if native.current is None else "native"}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = "native" if device.by_triton else "stock"
        return found

    def forked(self) -> None:
        """In a forked child: neither the thread nor whoever asked is there, and the lock may have been held."""
        self._forget()

    def fault(self, error: BaseException) -> None:
        """Tells everybody who asked of a fault of the kernels."""
        for _, report in list(self._asked.values()):
            report("kernels", error)

    def _get(self, build: compiler.Build) -> None:
        library, unavailable, fault = None, None, None
        try:
            library = native.Library(build.load())
            native.check(library)
        except compiler.Unavailable as error:
            unavailable = str(error)
        except Exception as error:
            library, unavailable, fault = None, repr(error), error
        with self._lock:
            if build is not self._build:
                return  # stopped meanwhile: nobody knows how it would have ended
            self._library, self._unavailable, self._build = library, unavailable, None
            self._warned |= fault is not None
            self._settle()
        if fault is not None:
            self.fault(fault)

    def _settle(self) -> None:
        """Puts the wishes into effect; one watch that wants stock operations is enough for them."""
        choices = {choice for choice, _ in self._asked.values()}
        native.current = None if "stock" in choices else self._library
        device.by_triton = choices == {"native"} and not device.triton_failed
        if self._unavailable is not None and "native" in choices and not self._warned:
            self._warned = True
            _log.warning(
                "gradexporter: kernels='native' is not possible in main memory, stock torch operations do the same: %s",
                self._unavailable,
            )


process = Kernels()
device.tell_fault = process.fault
atexit.register(process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.forked)
