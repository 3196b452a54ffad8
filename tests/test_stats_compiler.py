"""Building and keeping the library of native kernels: whatever the machine is like, a run goes on with stock ones."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import missing
from torch import nn

from gradexporter.fence import Fence
from gradexporter.monitor import Monitor
from gradexporter.stats import compiler, kernels, native
from gradexporter.stats.compiler import Build, Unavailable

WAIT_SECONDS = 120.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "gradexporter"


@pytest.fixture
def works(native_library: native.Library, remembering_compiler: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A compiler that works."""
    monkeypatch.setenv("CC", remembering_compiler)
    return remembering_compiler


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[kernels.Kernels]:
    """Kernels as in a process that has just begun."""
    monkeypatch.setenv("GRADEXPORTER_KERNELS", "auto")
    monkeypatch.setattr(native, "current", None)
    fresh = kernels.Kernels()
    monkeypatch.setattr(kernels, "process", fresh)
    yield fresh
    fresh.stop()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def watched(watch: Callable[..., Monitor], **settings: str) -> Monitor:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, **settings)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert monitor.flush()
    return monitor


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def built(cache: Path) -> Path:
    Build().load()
    [library] = libraries(cache)
    return library


# -- the cache --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("works")
def test_a_library_is_built_once_and_is_private(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(cache)
    first = library.stat()
    monkeypatch.setattr(Build, "_compile", lambda *_: pytest.fail("compiled again"))
    Build().load()

    assert stat.S_IMODE(first.st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert library.stat().st_ino == first.st_ino
    assert {entry.name for entry in cache.iterdir()} == {library.name, "lock"}


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "writable", "link"])
def test_a_library_that_is_not_as_it_was_written_is_built_anew(cache: Path, tmp_path: Path, damage: str) -> None:
    """Cut short, it would be a SIGBUS in the user's run; written by others, it is theirs."""
    library = built(cache)
    content = library.read_bytes()
    library.unlink()  # this process has it mapped
    if damage == "link":
        (tmp_path / "elsewhere.so").write_bytes(content)
        library.symlink_to(tmp_path / "elsewhere.so")
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        library.write_bytes({"cut": content[:4096], "empty": b"", "changed": changed, "writable": content}[damage])
        library.chmod(0o666 if damage == "writable" else 0o600)

    native.check(native.Library(Build().load()))

    assert stat.S_IMODE(library.lstat().st_mode) == 0o600
    assert not library.is_symlink()
    assert library.stat().st_size == len(content)


@pytest.mark.usefixtures("works")
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, tmp_path: Path) -> None:
    """The library is then built for this process alone, and leaves nothing behind."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)

    native.check(native.Library(Build().load()))

    assert not list(cache.iterdir())
    assert {entry.name for entry in tmp_path.iterdir()} == {"cache"}


@pytest.mark.usefixtures("works")
def test_a_cache_whose_parent_everybody_may_rename_in_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)

    native.check(native.Library(Build().load()))

    assert not list(cache.iterdir())


@pytest.mark.usefixtures("works")
def test_without_a_cache_the_library_is_built_for_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it, not by root either

    native.check(native.Library(Build().load()))

    assert {entry.name for entry in tmp_path.iterdir()} == {"file"}


def test_nowhere_to_write_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_or_skip()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))

    with pytest.raises(Unavailable, match="can be written"):
        Build().load()


@pytest.mark.usefixtures("works")
def test_two_processes_compile_once(cache: Path, tmp_path: Path, works: str) -> None:
    calls = tmp_path / "calls"
    counted = fake_compiler(tmp_path, f'echo "$@" >> {calls}\nexec {works} "$@"')
    script = "from gradexporter.stats import compiler, native; native.check(native.Library(compiler.Build().load()))"
    environ = {**os.environ, "CC": counted}
    both = [subprocess.Popen([sys.executable, "-c", script], env=environ) for _ in range(2)]

    assert [one.wait(WAIT_SECONDS) for one in both] == [0, 0]
    assert len([line for line in calls.read_text().splitlines() if " -c " in line]) == 1
    assert len(libraries(cache)) == 1


def test_source_compiler_and_flags_make_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = fake_compiler(tmp_path, "true")
    keys = [compiler._key([one], b"a"), compiler._key([one], b"b"), compiler._key([one, "-m32"], b"a")]
    monkeypatch.setattr(compiler, "_processor", lambda: "another")
    keys.append(compiler._key([one], b"a"))
    fake_compiler(tmp_path, "true # a newer one")
    keys.append(compiler._key([one], b"a"))

    assert len(set(keys)) == 5
    assert keys[-1] == compiler._key([one], b"a")


# -- compilers --------------------------------------------------------------------------------------


def compiler_or_skip() -> None:
    try:
        compiler.compiler()
    except Unavailable as reason:
        missing(str(reason))


def test_without_a_compiler_stock_operations_go_on(
    watch: Callable[..., Monitor],
    process: kernels.Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody asked for native kernels by name, so nobody is told that there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING, "gradexporter"):
        monitor = watched(watch)
        assert process.wait(WAIT_SECONDS)

    assert process.in_use()["cpu"] == "stock"
    assert monitor.report is not None
    assert not caplog.records


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'no licence found' >&2; exit 3", "no licence found"),
        ("exit 0", "cannot be used"),  # writes nothing
        ('while [ "$1" != -o ]; do shift; done; echo "#!/bin/false" > "$2"; chmod +x "$2"', "trial failed with 1"),
        ('while [ "$1" != -o ]; do shift; done; echo "#!/bin/true" > "$2"; chmod +x "$2"', "no word from it"),
        ('[ "$1" != -shared ] || exec cp /bin/sh.none "$4"; exec {works} "$@"', "failed with 1"),
        ('[ "$1" != -shared ] || { echo junk > "$4"; exit; }; exec {works} "$@"', "cannot be loaded"),
    ],
)
def test_a_broken_compiler_is_said_once_to_whoever_asked_for_native_kernels(
    watch: Callable[..., Monitor],
    process: kernels.Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    works: str,
    script: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script.replace("{works}", works)))
    with caplog.at_level(logging.WARNING, "gradexporter"):
        for _ in range(2):
            monitor = watched(watch, kernels="native")
            assert process.wait(WAIT_SECONDS)
            monitor.close()

    [record] = caplog.records
    assert reason in record.getMessage()
    assert process.in_use()["cpu"] == "stock"


@pytest.mark.usefixtures("works")
def test_a_library_that_computes_something_else_is_refused_and_counted(
    process: kernels.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, 'sed -i "s/all->largest = /&2 * /" $TMPDIR/k.c; cc "$@"'))
    fence = Fence()

    process.ask(fence, "auto", fence.record)
    assert process.wait(WAIT_SECONDS)

    assert process.in_use()["cpu"] == "stock"
    assert fence.failures["kernels"] == 1


@pytest.mark.usefixtures("works")
def test_a_library_with_instructions_that_the_machine_lacks_never_reaches_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = 'sed -i "s/double step = -1, root = 1/__builtin_trap(); &/" $TMPDIR/k.c; cc "$@"'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, trap))

    with pytest.raises(Unavailable, match="trial failed with -"):
        Build().load()


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600"))

    with pytest.raises(Unavailable, match="longer than"):
        Build().load()

    assert gone(int((tmp_path / "pid").read_text()))


def gone(pid: int) -> bool:
    """Whether no process has this number, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


# -- the process that it runs in ----------------------------------------------------------------------


@pytest.mark.usefixtures("works")
def test_a_watch_does_not_wait_for_the_compiler_and_changes_over_when_it_is_done(
    watch: Callable[..., Monitor], process: kernels.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: str
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f'while [ ! -e {go} ]; do sleep 0.05; done; exec {works} "$@"'))
    before = os.environ.copy(), os.getcwd(), signal.getsignal(signal.SIGCHLD)

    monitor = watched(watch)
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.kernels == {"cpu": "stock"}
    go.touch()
    assert process.wait(WAIT_SECONDS)

    assert process.in_use() == {"cpu": "native"}
    assert before == (os.environ.copy(), os.getcwd(), signal.getsignal(signal.SIGCHLD))
    monitor.close()
    assert monitor.snapshot.itself.kernels == {"cpu": "native"}


def test_the_last_watch_to_end_ends_the_build(
    watch: Callable[..., Monitor],
    process: kernels.Kernels,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = tmp_path / "pid"
    os.mkfifo(started)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, f"echo $$ > {started}; sleep 600"))
    monitor = watched(watch)
    pid = int(started.read_text())

    monitor.close()

    assert gone(pid)
    assert "gradexporter-kernels" not in {thread.name for thread in threading.enumerate()}
    assert {entry.name for entry in cache.iterdir()} <= {"lock"}


@pytest.mark.usefixtures("works")
def test_one_watch_that_wants_stock_kernels_has_them(process: kernels.Kernels) -> None:
    one, other, fence = Fence(), Fence(), Fence()
    process.ask(one, "auto", fence.record)
    assert process.wait(WAIT_SECONDS)
    states = [process.in_use()["cpu"]]
    process.ask(other, "stock", fence.record)
    states.append(process.in_use()["cpu"])
    process.unask(other)
    states.append(process.in_use()["cpu"])

    assert states == ["native", "stock", "native"]


@pytest.mark.usefixtures("process")
def test_stock_kernels_start_no_thread_and_no_compiler(watch: Callable[..., Monitor], cache: Path) -> None:
    watched(watch, kernels="stock")

    assert "gradexporter-kernels" not in {thread.name for thread in threading.enumerate()}
    assert not cache.exists()


def test_a_program_that_handles_its_children_gets_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_or_skip()
    reaped: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: reaped.append(os.waitpid(-1, 0)[0]))
    try:
        with pytest.raises(Unavailable, match="SIGCHLD"):
            Build().load()
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert not reaped


@pytest.mark.usefixtures("works")
def test_children_that_nobody_waits_for_are_no_obstacle() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        native.check(native.Library(Build().load()))
    finally:
        signal.signal(signal.SIGCHLD, before)


def ended(script: str, **environ: str) -> None:
    """Runs a script to its end, which must come soon and without a sound."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env={**os.environ, "GRADEXPORTER_KERNELS": "auto", "OMP_NUM_THREADS": "1", **environ},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


TRAINING = """
    import os, torch, gradexporter
    from torch import nn
    from gradexporter.stats import kernels, native
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    monitor = gradexporter.watch(model, optimizer, serve=False)
    step()
"""


def test_an_exit_while_the_compiler_runs_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    pids = tmp_path / "pids"
    hangs = fake_compiler(tmp_path, f"echo $$ >> {pids}; sleep 600")

    ended(f"{TRAINING}\n    while not os.path.exists({str(pids)!r}): step()", CC=hangs)

    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert {entry.name for entry in cache.iterdir()} <= {"lock"}


@pytest.mark.usefixtures("works")
def test_a_fork_before_and_after_the_library_came_is_no_harm() -> None:
    fork = """
    child = os.fork()
    if child == 0:
        step()
        monitor = gradexporter.watch(model, optimizer, serve=False)
        assert kernels.process.wait(100)
        assert native.current is not None
        step()
        assert monitor.flush() and monitor.report.step == 1
        monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """

    ended(f"{TRAINING}{fork}\n    assert kernels.process.wait(100) and native.current\n{fork}\n    monitor.close()")


def test_the_source_is_shipped(tmp_path: Path) -> None:
    """A wheel and a source distribution without it would be stock kernels for everybody."""
    pytest.importorskip("hatchling")
    root = Path(__file__).resolve().parent.parent
    for kind, name in (("wheel", "*.whl"), ("sdist", "*.tar.gz")):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)]
        subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=WAIT_SECONDS)
        [archive] = tmp_path.glob(name)
        shutil.unpack_archive(archive, tmp_path / kind, "zip" if kind == "wheel" else "gztar")
        assert list((tmp_path / kind).rglob("stats/kernels.c")), kind
