"""What every test may ask for: the data beside the project and the real programs.

Without them a test skips and says why; under CI their absence is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Stock kernels unless a test asks for others, so that no test depends on when a compiler is done.

    ``GRADEXPORTER_KERNELS=native pytest`` takes the native ones.
    """
    os.environ.setdefault("GRADEXPORTER_KERNELS", "stock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out unless ``-m`` speaks of them, so that any other ``-m`` does not bring them in."""
    if re.search(r"\bslow\b", config.option.markexpr):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def missing(what: str) -> None:
    """Skips the test, or fails it under CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing, which under CI is a failure")
    pytest.skip(f"{what} is missing; `make tools` installs the programs")


def _folder(variable: str, default: str) -> Path:
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / default))
    if not folder.is_dir():
        missing(f"{variable} ({folder})")
    return folder


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of recorded runs, from GRADEXPORTER_CORPUS."""
    return _folder("GRADEXPORTER_CORPUS", "corpus")


@pytest.fixture(scope="session")
def cases() -> Path:
    """Folder of small training runs, from GRADEXPORTER_CASES."""
    return _folder("GRADEXPORTER_CASES", "cases")


@pytest.fixture(scope="session")
def schemas() -> Path:
    """Folder of Grafana and CRD schemas, from GRADEXPORTER_SCHEMAS."""
    return _folder("GRADEXPORTER_SCHEMAS", "schemas")


@pytest.fixture(scope="session")
def tool() -> Callable[..., str]:
    """Path of a program: ``tool("promtool")`` from the machine, or else from .tools/base, where `make tools` unpacks
    what the machine lacks; ``tool("promtool", lane="new")`` from .tools/new."""

    def find(name: str, lane: str | None = None) -> str:
        on_machine = shutil.which(name) if lane is None else None
        found = on_machine or shutil.which(name, path=str(TOOLS / (lane or "base")))
        if found is None:
            missing(f"the program {name}" + (f" in .tools/{lane}" if lane else ""))
            raise AssertionError
        return found

    return find


_REMEMBERING_COMPILER = """#!/bin/sh
# The machine's compiler, which compiles a source once.
case " $* " in *" -c "*) ;; *) exec cc "$@" ;; esac
for output; do :; done
kept="$0.$(cksum < "${output%.o}.c" | tr ' ' -)"
[ -e "$kept" ] || { cc "$@" && cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"; } || exit 1
cp "$kept" "$output"
"""


@pytest.fixture(scope="session")
def remembering_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a C compiler that many tests can call."""
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(_REMEMBERING_COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory, remembering_compiler: str) -> Any:
    """The compiled library of native kernels, from a cache of this session."""
    from gradexporter.stats import compiler, native

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CC", remembering_compiler)
        try:
            return native.Library(compiler.Build().load())
        except compiler.Unavailable as reason:
            missing(f"a working C compiler ({reason})")


@pytest.fixture
def native_kernels(native_library: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same library, in use from the first step of every watch of the test."""
    from gradexporter.stats import kernels, native

    monkeypatch.setenv("GRADEXPORTER_KERNELS", "native")
    monkeypatch.setattr(kernels.process, "_library", native_library)
    monkeypatch.setattr(native, "current", native_library)
    return native_library


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares text with tests/golden/NAME; ``pytest --update`` rewrites it."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} does not exist; run pytest --update and read the result"
        assert path.read_text() == text

    return compare


@pytest.fixture
def watch() -> Iterator[Callable[..., Any]]:
    """``gradexporter.watch`` without an endpoint; afterwards every monitor is closed and has had no fault."""
    import torch

    import gradexporter

    torch.set_num_threads(1)
    monitors = []

    def start(*args: Any, **settings: Any) -> Any:
        monitors.append(gradexporter.watch(*args, serve=False, **settings))
        return monitors[-1]

    yield start
    for monitor in monitors:
        snapshot = monitor.snapshot
        monitor.close()
        assert snapshot is None or not any(snapshot.itself.failures.values()), snapshot.itself.failures


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Any]:
    """Two processes of one gloo group, for ``two_ranks.run(function)``; see tests/distributed/harness.py."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Any]:
    """Four processes of one gloo group."""
    yield from _ranks(4)


def _ranks(size: int) -> Iterator[Any]:
    from tests.distributed.harness import started

    yield from started(size)
