"""``kernels.c`` as a loaded library: built by the machine's own C compiler, kept in the user's cache.

Nothing here is asked for on the trainer thread, and nothing is trusted unseen. A library that is not what was
written, or that somebody else could have written, is built anew; a fresh one runs in a process of its own before
it is loaded into the user's.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
)

COMPILE_SECONDS = 60.0
"""Longest that one call of the compiler may take; a second is usual."""

TURN_SECONDS = 90.0
"""Longest that a process waits for another one that builds the same library."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_CPU_FACTS = frozenset(
    [
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "isa"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    ]
)
"""What of /proc/cpuinfo decides which instructions ``-march=native`` means."""


class Unavailable(Exception):
    """There is no library, and why."""


class Build:
    """One attempt to get the library, for a thread of its own; ``stop`` ends it from any other."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends the compiler if it runs; whoever waits for the library finds ``Unavailable``."""
        self._stopped.set()

    def load(self) -> ctypes.CDLL:
        """The library, from the cache or built now; raises ``Unavailable``."""
        command = compiler()
        source = resources.files(__package__).joinpath("kernels.c").read_bytes()
        name = f"kernels-{_key(command, source)}.so"
        folder = cache_folder()
        reason = _why_unsafe(folder) if folder is not None else "no home"
        if folder is None or reason is not None:
            return self._for_once(command, source, name)
        target = folder / name
        if not _is_ours(target):
            with self._turn(folder):
                if not _is_ours(target):
                    self._compile(command, source, target)
        return _load(target)

    def _for_once(self, command: Sequence[str], source: bytes, name: str) -> ctypes.CDLL:
        """Where the cache cannot be written: built for this process alone, and gone from the disk at once."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="gradexporter-"))
        except OSError as error:
            raise Unavailable(f"neither the cache nor the folder for temporary files can be written: {error}") from None
        try:
            self._compile(command, source, folder / name)
            return _load(folder / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _turn(self, folder: Path) -> Iterator[None]:
        """One process after the other, so that the ranks of a machine compile once."""
        with open(folder / "lock", "wb") as lock:
            until = time.monotonic() + TURN_SECONDS
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._stopped.wait(0.05):
                        raise Unavailable("stopped") from None
                except OSError:
                    break  # a file system without locks: each builds its own, and the last rename stays
            try:
                yield
            finally:
                with suppress(OSError):  # not left to the close: a forked child holds the same lock
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def _compile(self, command: Sequence[str], source: bytes, target: Path) -> None:
        if not _may_have_children():
            raise Unavailable("the program handles SIGCHLD itself, and a compiler would be a child that it knows not")
        work = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
        try:
            written, objects, shared, trial = (str(work / name) for name in ("k.c", "k.o", "k.so", "trial"))
            Path(written).write_bytes(source)
            self._run([*command, *FLAGS, "-c", written, "-o", objects], work)
            self._run([*command, "-shared", objects, "-o", shared, "-lm"], work)
            self._run([*command, objects, "-o", trial, "-lm"], work)
            said = self._run([trial], work)
            if said != "fine":  # not by its status, which somebody else may have fetched
                raise Unavailable(f"the library fails its trial run: {said or 'no word from it'}")
            content, sealed = Path(shared).read_bytes(), work / "sealed"
            with open(os.open(sealed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content + hashlib.sha256(content).digest())
            os.replace(sealed, target)
        except OSError as error:
            raise Unavailable(f"{target.parent} cannot be used: {error}") from None
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _run(self, command: Sequence[str], work: Path) -> str:
        """What the command said; raises when it fails, takes too long, or is no longer wanted.

        Without a pipe, of which a child that the user forks meanwhile would hold the other end: subprocess waits
        on one until that child ends.
        """
        if self._stopped.is_set():
            raise Unavailable("stopped")
        said = work / "said"
        process = os.posix_spawn(
            command[0],
            list(command),
            {**os.environ, "LC_ALL": "C", "TMPDIR": str(work)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(said), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,  # Ctrl-C is not for it
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process, 19)
        until = time.monotonic() + COMPILE_SECONDS
        while (status := _status(process)) is None:
            if self._stopped.wait(0.02) or time.monotonic() > until:
                with suppress(OSError):
                    os.killpg(process, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)
                stopped = self._stopped.is_set()
                raise Unavailable("stopped" if stopped else f"{command[0]} took longer than {COMPILE_SECONDS:.0f} s")
        words = said.read_text(errors="replace").strip()
        if status != 0:
            raise Unavailable(f"{command[0]} failed with {status}: {words.splitlines()[0] if words else 'no message'}")
        return words


def _status(process: int) -> int | None:
    """Exit status of a child, negative for a signal; None while it runs, 0 if somebody else fetched it."""
    try:
        done, status = os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if done else None


def compiler() -> list[str]:
    """Command of the C compiler: CC, or the first of cc, gcc and clang."""
    for words in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        found = shutil.which(words[0]) if words else None
        if found is not None:
            return [found, *words[1:]]
    raise Unavailable("no C compiler (cc, gcc or clang) on PATH")


def cache_folder() -> Path | None:
    """Folder of the libraries of this user, made if it was not there; None where there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "gradexporter"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _key(command: Sequence[str], source: bytes) -> str:
    """Same source, compiler, flags and processor: same library."""
    program = os.stat(command[0])
    facts = [os.path.realpath(command[0]), str(program.st_size), str(program.st_mtime_ns), *command[1:], *FLAGS]
    facts += [sys.platform, platform.machine(), *platform.libc_ver(), _processor(), source.decode()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.processor()} of {platform.node()}"
    return "\n".join(line for line in first if line.partition(":")[0].strip() in _CPU_FACTS)


def _why_unsafe(folder: Path) -> str | None:
    """Why somebody else could put a library there; None if nobody can."""
    try:
        if not _private(folder.lstat(), stat.S_ISDIR):
            return "the folder belongs to somebody else, or others may write to it"
        for parent in folder.resolve().parents:
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"everybody may rename what is in {parent}"
    except OSError as error:
        return str(error)
    return None


def _private(entry: os.stat_result, kind: object) -> bool:
    right_kind = stat.S_ISDIR(entry.st_mode) if kind is stat.S_ISDIR else stat.S_ISREG(entry.st_mode)
    return right_kind and entry.st_uid == os.geteuid() and not entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_ours(target: Path) -> bool:
    """Whether the file is there, private and whole: a library that was cut short is a SIGBUS in the user's run."""
    try:
        if not _private(target.lstat(), stat.S_ISREG):
            return False
        content = target.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _load(target: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise Unavailable(f"the library cannot be loaded: {error}") from None


def _may_have_children() -> bool:
    """Whether nobody minds a child that ends: no handler of SIGCHLD, or torch's, which knows its own."""
    handler = signal.getsignal(signal.SIGCHLD)
    return handler in (signal.SIG_DFL, signal.SIG_IGN) or str(getattr(handler, "__module__", "")).startswith("torch.")
