"""The benchmark runs and says what it should; how fast anything is, is no matter of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_a_run_writes_every_figure_and_checks_every_target(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    run = subprocess.run(
        [sys.executable, str(FOLDER), "--tiny", "--model", "many", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert run.returncode in (0, 1), run.stderr  # whether the targets hold, in words of a script
    figures = json.loads(file.read_text())
    rows = {row["contestant"]: row for row in figures["rows"]}
    assert {"nothing", "clip_grad_norm_", "hand-written loop", "anomaly mode", "disabled"} < rows.keys()
    assert {"gradients (stock)", "default (stock)", "everything (stock)"} < rows.keys()
    for row in rows.values():
        assert row["bare_ms"] > 0
        assert row["process"]["low"] <= row["process"]["median"] <= row["process"]["high"]
        assert row["self_ms"] is None or row["self_ms"] < row["bare_ms"] * 100
    assert rows["anomaly mode"]["self_ms"] is None  # its cost is in autograd's own nodes
    assert rows["everything (stock)"]["self_ms"] > 0
    assert rows["default (stock)"]["steps"] % 10 == 0
    assert figures["conditions"]["processors"] >= 1
    assert [one["model"] for one in figures["memory"]] == ["many"]
    assert [one["model"] for one in figures["budget"]] == ["many"]
    assert figures["exposition"]["series"] == 240
    assert {check["holds"] for check in figures["checks"]} <= {True, False}
    assert "many: bare step" in run.stdout
    assert "targets hold" in run.stdout


def test_an_unknown_model_is_refused_by_name() -> None:
    run = subprocess.run([sys.executable, str(FOLDER), "--model", "vgg"], capture_output=True, text=True, timeout=120)

    assert run.returncode == 2
    assert "unknown model 'vgg': choose from mlp, gpt, conv, many" in run.stderr


def test_a_target_is_held_against_the_noise_and_the_clip_of_its_own_run(benchmark_modules: None) -> None:
    import targets
    from measuring import Row, Spread

    def row(contestant: str, own: float, ratio: float, noise: float = 0.0) -> Row:
        process = Spread(ratio, ratio - noise, ratio + noise)
        return Row("gpt", contestant, 10, 1, 400.0, own, own / 400.0, process, process, process)

    rows = [
        row("nothing", 0.0, 1.0, noise=0.02),
        row("clip_grad_norm_", 2.0, 1.01),
        row("gradients (stock)", 2.4, 1.026),
        row("default (stock)", 12.0, 1.05),
    ]

    found = {(check.what, check.holds): check.value for check in targets.checks(rows, [], None, [])}

    assert found == {
        ("gradients (stock), own CPU time", True): pytest.approx(0.6),
        ("gradients (stock), CPU time of the process", True): pytest.approx(0.6),
        ("gradients (stock), in clips", False): pytest.approx(1.2),
        ("default (stock), own CPU time", False): pytest.approx(3.0),
        ("default (stock), CPU time of the process", False): pytest.approx(3.0),
    }
