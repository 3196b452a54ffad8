"""The demo: the run of the README, its scenarios, and how they are told."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

import gradexporter
from gradexporter.cli import main
from gradexporter.demo.course import Course
from gradexporter.demo.play import Options, play
from gradexporter.demo.scenarios import SCENARIOS
from gradexporter.demo.training import Training
from gradexporter.demo.words import number, sparkline, verdict
from gradexporter.records import Finding, FindingKind, FirstNonfinite, Quantity, Severity, Shape, State, StepReport

KEYS = [
    "scenario",
    "seed",
    "steps",
    "spike_step",
    "cascade_step",
    "first_nonfinite_step",
    "lead_steps",
    "first_nonfinite",
    "shape",
    "last_healthy_step",
]


def demo_json(capsys, *arguments: str):
    assert main(["demo", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gradexporter", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the demo ended without {text!r}: {process.stderr.read() if process.stderr else ''}")


def told(scenario: str, *, terminal: bool, width: int = 100, height: int = 40, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, height=height, highlight=False)
    assert play(Options(scenario=scenario, port=0, step_seconds=0.0, **options), console, Console(stderr=True)) == 0
    return out.getvalue()


# -- what happens in the runs -------------------------------------------------------------------------


def test_the_run_of_the_readme_is_flagged_at_least_five_steps_before_its_nan(capsys):
    outcome = demo_json(capsys, "--port", "0")

    assert list(outcome) == KEYS
    assert outcome["scenario"] == "spike_cascade"
    assert (outcome["seed"], outcome["steps"]) == (1, 64)
    assert outcome["spike_step"] <= 54
    assert outcome["cascade_step"] <= 54
    assert outcome["first_nonfinite_step"] == 59
    assert outcome["first_nonfinite"] == {"layer": "6", "quantity": "activation"}
    assert outcome["lead_steps"] == 59 - min(outcome["spike_step"], outcome["cascade_step"]) >= 5
    assert outcome["last_healthy_step"] <= 50
    assert outcome["shape"] == "spike_cascade"


def test_of_ten_seeds_some_die_and_each_is_in_a_cascade_two_steps_before(capsys):
    outcomes = demo_json(capsys, "--seeds", "0-9")

    assert [outcome["seed"] for outcome in outcomes] == list(range(10))
    lost = [outcome for outcome in outcomes if outcome["first_nonfinite_step"] is not None]
    assert 2 <= len(lost) <= 7
    for outcome in lost:
        assert outcome["cascade_step"] <= outcome["first_nonfinite_step"] - 2
        assert outcome["shape"] == "spike_cascade"
    for outcome in outcomes:
        assert list(outcome) == KEYS
        assert (outcome["lead_steps"] is None) == (outcome["first_nonfinite"] is None)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("spike_cascade", "healthy")])
def test_every_scenario_is_called_by_its_name(scenario, seed, capsys):
    outcome = demo_json(capsys, "--scenario", scenario, "--seed", str(seed), "--port", "0")

    assert outcome["shape"] == SCENARIOS[scenario].shape


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_raises_no_alarm(seed):
    training = Training(SCENARIOS["healthy"], seed)
    with gradexporter.watch(
        training.model, training.optimizer, serve=False, activation_every=1, state_every=1
    ) as monitor:
        for _ in range(SCENARIOS["healthy"].steps):
            training.step(monitor)
        monitor.flush()

        assert [finding for finding in monitor.findings if finding.severity is not Severity.INFO] == []
        assert monitor.report is not None
        assert monitor.report.diagnosis is None
        assert monitor.report.state is State.HEALTHY


@pytest.mark.parametrize("scenario", ["spike_cascade", "oscillation"])
def test_losses_and_weights_are_the_same_bit_for_bit_unwatched(scenario):
    def trained(watched: bool) -> tuple[list[bytes], list[bytes]]:
        training = Training(SCENARIOS[scenario], 1)
        monitor = gradexporter.watch(training.model, training.optimizer, serve=False) if watched else None
        losses = [training.step(monitor) for _ in range(SCENARIOS[scenario].steps)]
        if monitor is not None:
            monitor.close()
        return bits(losses), bits(training.model.state_dict().values())

    assert trained(watched=True) == trained(watched=False)


def bits(tensors) -> list[bytes]:
    return [
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in map(torch.atleast_1d, tensors)
    ]


def test_the_run_follows_the_recorded_trace_up_to_the_jump(corpus):
    recorded = json.loads((corpus / "demo_trace.json").read_text())
    column = recorded["columns"].index("loss")
    training = Training(SCENARIOS["spike_cascade"], 1)

    for row in recorded["runs"]["1"]["rows"][:54]:
        assert training.step().item() == pytest.approx(row[column], rel=5e-3)


def test_a_run_may_be_longer_than_the_data():
    training = Training(SCENARIOS["healthy"], 0)

    losses = [float(training.step()) for _ in range(2 * 112 + 1)]

    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])


# -- how they are told ----------------------------------------------------------------------------------


def test_without_a_terminal_the_demo_writes_plain_lines():
    text = told("spike_cascade", terminal=False)

    assert "\x1b" not in text
    assert "\r" not in text
    assert "non-finite at step 59" in text
    assert "first non-finite  step 59: activation of layer 6" in text
    assert "looked calm       step 53: loss 3.49, gradient norm 7.13; one step later 383, 53.7x" in text
    assert "What to do\n  - " in text
    states = [line.split()[-1] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert list(dict.fromkeys(states)) == ["warming_up", "healthy", "cascade", "nonfinite"]


def test_a_healthy_run_says_that_there_is_nothing_to_report():
    text = told("healthy", terminal=False)

    assert "\nNothing to report in 64 steps.\n" in text
    assert "What to do" not in text


@pytest.mark.parametrize(("width", "height"), [(100, 45), (72, 24), (40, 12)])
def test_the_screen_fits_the_terminal(width, height):
    text = told("spike_cascade", terminal=True, width=width, height=height)

    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    assert max(map(len, lines)) <= width
    assert any("nonfinite" in line for line in lines)
    assert "non-finite at step 59: 11 steps ahead." in " ".join(" ".join(lines).split())


def test_several_runs_end_in_a_table_and_a_count():
    text = told("spike_cascade", terminal=False, seeds=(1, 3), series=True)

    head, first, second, _, count = text.splitlines()
    assert " ".join(head.split()) == "seed spike cascade non-finite lead first non-finite value shape last healthy"
    assert first.split()[0] == "1"
    assert "activation of layer 6" in first
    assert second.split()[:5] == ["3", "-", "-", "-", "-"]
    assert count == "1 of 2 runs went non-finite."


def test_a_series_of_runs_keeps_the_log_out_of_its_table(caplog):
    told("spike_cascade", terminal=False, seeds=(1,), series=True)

    assert caplog.messages == []


def test_json_prints_one_object_and_nothing_else(capsys):
    assert main(["demo", "--json", "--scenario", "nan_from_start", "--steps", "3", "--port", "0"]) == 0

    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text)["first_nonfinite_step"] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (math.nan, "NaN"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
        (0.0, "0"),
        (7.126, "7.13"),
        (-12.6, "-12.6"),
        (999.7, "1000"),
        (14067.2, "14067"),
        (99999.9, "1.00e5"),
        (3.33e14, "3.33e14"),
        (0.00512, "0.00512"),
        (4.1e-300, "4.10e-300"),
    ],
)
def test_a_number_has_three_digits(value, expected):
    assert expected == number(value)


def test_the_sparkline_is_flat_while_calm_then_climbs_then_crosses():
    calm = [(norm, State.HEALTHY) for norm in (1.0, 1.1, 0.9, 1.0)]
    line = sparkline([*calm, (1e2, State.CASCADE), (1e9, State.CASCADE), (math.nan, State.NONFINITE)], 64)

    assert line.plain == "▂▂▂▂▆█×"


def test_a_long_run_is_condensed_without_losing_its_spike():
    norms = [(1.0, State.HEALTHY)] * 1000
    norms[500] = (1e6, State.SPIKE)

    line = sparkline(norms, 50, unicode=False)

    assert len(line) == 50
    assert line.plain.count("%") + line.plain.count("#") == 1


# -- what a course keeps ----------------------------------------------------------------------------------


def course_of(*reports: StepReport) -> Course:
    course = Course("spike_cascade", 1)
    for report in reports:
        course.add(report)
    return course


def step(number: int, state: State, norm: float = 1.0, spiked: bool = False, **fields) -> StepReport:
    spike = Finding(kind=FindingKind.GRADIENT_SPIKE, severity=Severity.WARNING, step=number, quantity=Quantity.GRADIENT)
    return StepReport(step=number, state=state, gradient_norm=norm, findings=(spike,) if spiked else (), **fields)


def test_a_state_that_is_skipped_counts_as_passed():
    place = FirstNonfinite(step=2, layer="loss", quantity=Quantity.LOSS)
    outcome = course_of(step(1, State.HEALTHY), step(2, State.NONFINITE, first_nonfinite=place)).outcome

    assert (outcome.spike_step, outcome.cascade_step, outcome.lead_steps) == (2, 2, 0)


def test_a_calm_step_in_a_cascade_and_the_jump_out_of_it_are_remembered():
    course = course_of(
        step(1, State.HEALTHY, 1.0),
        step(2, State.CASCADE, 20.0, spiked=True),
        step(3, State.CASCADE, 2.0),
        step(4, State.CASCADE, 100.0, spiked=True),
        step(5, State.CASCADE, 9000.0, spiked=True),
    )

    assert course.jump is not None
    assert (course.jump.calm.step, course.jump.hot.step, course.jump.factor) == (3, 4, 50.0)


def test_the_first_spike_of_a_healthy_run_is_no_jump_out_of_a_cascade():
    assert course_of(step(1, State.HEALTHY), step(2, State.SPIKE, 20.0, spiked=True)).jump is None


@pytest.mark.parametrize(
    ("reports", "sentence"),
    [
        ([step(1, State.HEALTHY)], "Nothing to report in 1 step."),
        ([step(1, State.SPIKE), step(2, State.HEALTHY)], "Flagged at step 1, and finite after all 2 steps."),
        (
            [
                step(1, State.SPIKE),
                step(2, State.NONFINITE, first_nonfinite=FirstNonfinite(step=2, layer="6", quantity=Quantity.GRADIENT)),
            ],
            "Flagged at step 1, non-finite at step 2: 1 step ahead.",
        ),
        (
            [step(1, State.NONFINITE, first_nonfinite=FirstNonfinite(step=1, layer="loss", quantity=Quantity.LOSS))],
            "Non-finite at step 1, without a finite warning.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(reports, sentence):
    assert sentence == verdict(course_of(*reports))[0]


# -- serving, holding, stopping ---------------------------------------------------------------------------


def test_the_final_state_is_served_while_the_demo_holds():
    with started("--port", "0", "--hold", "60") as process:
        url = line_with(process, "is served at").split()[-1]
        line_with(process, "The final state stays at")
        metrics = urllib.request.urlopen(url, timeout=10).read().decode()
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=20) == 0
    assert "gradexporter_health_state{" in metrics
    assert next(line for line in metrics.splitlines() if line.startswith("gradexporter_health_state{")).endswith(" 4.0")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_tells_what_it_has_seen_and_says_so_in_its_exit_status(number, status):
    with started("--port", "0", "--step-seconds", "0.05", "--scenario", "healthy") as process:
        line_with(process, "healthy")
        line_with(process, "warming_up")
        began = time.monotonic()
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)

    assert process.returncode == status
    assert time.monotonic() - began < 3.0
    assert "Nothing to report in" in rest
    assert "Traceback" not in rest


def test_a_stopped_run_still_prints_its_json():
    with started("--json", "--port", "0", "--step-seconds", "600") as process:
        wait_for_threads(process.pid)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=20)

    assert process.returncode == 143
    assert json.loads(text)["steps"] <= 1


def wait_for_threads(pid: int) -> None:
    """Until the process serves: it then has more threads than its main one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(os.listdir(f"/proc/{pid}/task")) > 2:
            return
        time.sleep(0.05)
    raise AssertionError("the demo did not start")


def test_a_taken_port_moves_the_endpoint_and_never_the_demo():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]

        text = told_on(port)

    assert f":{port}/metrics" not in text
    assert "is served at" in text


def told_on(port: int) -> str:
    out = io.StringIO()
    assert play(Options(scenario="healthy", steps=2, port=port), Console(file=out), Console(stderr=True)) == 0
    return out.getvalue()


def test_shapes_of_scenarios_are_distinct():
    shapes = [scenario.shape for scenario in SCENARIOS.values()]

    assert len(set(shapes)) == len(shapes)
    assert SCENARIOS["nan_input"].shape is Shape.BAD_INPUT
