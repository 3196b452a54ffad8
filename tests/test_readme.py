"""The README and the examples say what is true: their code runs, their output is real, their lists are complete."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradexporter.config import ENV_PREFIX, Config
from tests import matrix

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NESTED = {"judge", "alerts"}
"""Settings that are trees of their own and have no environment variable."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def told(text: str) -> list[str]:
    """What must be the same wherever it is run: steps, states, and every word; figures only where they are steps."""
    lines = []
    for line in text.splitlines():
        if re.match(r" *\d+ ", line):
            lines.append(f"{line.split()[0]} {line.split()[-1]}")
        elif re.match(r"Flagged|  (first non-finite|lead|shape|last) ", line):
            lines.append(line)
        elif line.startswith("run "):
            lines.append("run ... is served at ...")
        elif not line.startswith("  gradient norm "):
            lines.append(re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", line))
    return lines


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_of_the_readme_runs(code, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADEXPORTER_PORT", "0")
    model = torch.nn.Linear(4, 2)
    names = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": torch.nn.functional.cross_entropy,
        "loader": [(torch.randn(8, 4), torch.randint(2, (8,)))] * 1000,
        "path": tmp_path / "checkpoint.pt",
    }

    exec(compile(code, "README.md", "exec"), names)

    assert names["monitor"].report.step == 1000
    assert names["monitor"].snapshot.last_checkpoint_step == 1000
    assert names["monitor"].snapshot.ended == "closed"


def test_the_output_of_the_readme_is_what_the_demo_writes(request):
    """``pytest --update`` puts the output of this machine into the README."""
    head = "$ gradexporter demo\n"
    (shown,) = [block for block in blocks("console") if block.startswith(head)]
    command = [sys.executable, "-m", "gradexporter", "demo", "--port", "0"]
    environ = {**os.environ, "GRADEXPORTER_RUN_ID": "4af615027baa"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ)
    if request.config.getoption("--update"):
        fresh = head + re.sub(r"http://\S+/metrics", "http://localhost:10420/metrics", done.stdout)
        (ROOT / "README.md").write_text(README.replace(shown, fresh))
        shown = fresh

    assert told(shown.removeprefix(head)) == told(done.stdout)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_an_example_runs_as_it_is(script):
    environ = {**os.environ, "GRADEXPORTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environ)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step ")
    assert ": healthy, " in done.stdout
    assert done.stderr == ""


def test_every_setting_is_listed_with_its_environment_variable_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", README, flags=re.MULTILINE)

    settings = [setting.name for setting in dataclasses.fields(Config)]
    expected = {name: "" if name in NESTED else ENV_PREFIX + name.upper() for name in settings}
    assert {name: variable for name, variable in rows if name in expected or variable} == expected


def test_every_room_has_its_line():
    package = ROOT / "gradexporter"
    modules = {f"gradexporter/{path.name}" for path in package.glob("[!_]*.py")}
    packages = {f"gradexporter/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    section = README.split("## Where things are")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)

    assert {name for name in listed if name.startswith("gradexporter/")} == modules | packages
    assert [name for name in listed if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)

    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_the_table_of_loops_is_that_of_the_tests(request):
    """``pytest --update`` writes it."""
    page = ROOT / "README.md"
    if request.config.getoption("--update"):
        page.write_text(matrix.splice(page.read_text()))

    assert matrix.splice(page.read_text()) == page.read_text()


def test_every_loop_of_the_table_has_a_test_and_no_test_names_another():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    named = {name for source in sources for name in re.findall(r"mark\.matrix\(\"([^\"]+)\"\)", source)}

    assert named == set(matrix.LOOPS)
