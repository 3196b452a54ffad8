"""What is shipped: the public names, what imports without torch, the wheel, the commands of the README."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import missing

import gradexporter

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_TORCH = [
    "records",
    "config",
    "tally",
    "exposure",
    "detect",
    "diagnose",
    "judge",
    "metrics",
    "sinks",
    "sinks.prometheus",
    "bundle.promql",
    "bundle.rules",
]
"""Rooms that replay, serve and test on machines that never train."""

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "sklearn", "grafana_foundation_sdk"}:
            raise ImportError(f"{name} is blocked by the test")

sys.meta_path.insert(0, Blocker())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gradexporter.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(gradexporter, name) is not None


def test_the_public_names_are_sorted_and_are_what_dir_and_star_show():
    shown: dict[str, object] = {}
    exec("from gradexporter import *", shown)

    assert sorted(gradexporter.__all__) == gradexporter.__all__
    assert dir(gradexporter) == gradexporter.__all__
    assert set(gradexporter.__all__) <= set(shown)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'gradexporter' has no attribute 'wacth'"):
        gradexporter.wacth  # noqa: B018


def test_the_version_is_one_that_an_index_accepts():
    assert re.fullmatch(r"\d+\.\d+\.\d+", gradexporter.__version__)


# -- imports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_behind_the_records_imports_with_torch_absent(room: str):
    done = python(f"{BLOCKER}\nimport gradexporter.{room}")

    assert done.returncode == 0, done.stderr


def test_a_step_is_judged_with_torch_absent():
    """The programmatic contract that replay and other tools rely on."""
    done = python(
        f"{BLOCKER}\n"
        "from gradexporter import Judge, StepReport\n"
        "report = Judge()(StepReport(step=1, loss=2.3, gradient_norm=1.0))\n"
        "print(report.state)"
    )

    assert done.stdout == "warming_up\n", done.stderr


def test_importing_the_package_imports_no_torch():
    done = python("import sys, gradexporter; print('torch' in sys.modules)")

    assert done.stdout == "False\n", done.stderr


# -- wheel ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as a user gets it, built with the hatchling of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_every_module_the_marker_of_types_and_the_licence(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())

    assert {str(file.relative_to(ROOT)) for file in (ROOT / "gradexporter").rglob("*.py")} <= names
    assert "gradexporter/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile):
    version = gradexporter.__version__

    assert {"gradexporter", f"gradexporter-{version}.dist-info"} == {name.split("/")[0] for name in wheel.namelist()}


def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile):
    entry_points = wheel.read(f"gradexporter-{gradexporter.__version__}.dist-info/entry_points.txt").decode()

    assert "gradexporter = gradexporter.cli:main" in entry_points


# -- documents ------------------------------------------------------------------------------------


def documents() -> str:
    return "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))


def test_every_make_target_that_the_documents_name_exists():
    targets = set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(_code(documents()))))

    assert {"demo", "test"} <= targets
    for target in sorted(targets):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_subcommand_that_the_documents_name_exists():
    subcommands = set(re.findall(r"\bgradexporter ([a-z]+)\b", "\n".join(_code(documents()))))

    assert "demo" in subcommands
    for subcommand in sorted(subcommands):
        done = subprocess.run(
            [sys.executable, "-m", "gradexporter", subcommand, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert subcommand in done.stdout


def _code(text: str) -> list[str]:
    """What stands in fences and between backticks."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return fences + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def test_the_repository_speaks_of_the_product_alone(tool: Callable[..., str]):
    """No file names the machine or the people that it was written with."""
    words = ["/" + "work/", "sub" + "agent", "farm" + "-", "." + "library"]
    listed = subprocess.run([tool("git"), "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        missing("a checkout of git, which says what files belong to the project,")

    for name in filter(None, listed.stdout.split("\0")):
        text = (ROOT / name).read_bytes().decode(errors="replace")
        for word in words:
            assert word not in text, f"{name} says {word!r}"
