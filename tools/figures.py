"""Draws the README picture from the demo's own run: .github/cascade-light.png and cascade-dark.png."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from gradexporter import watch
from gradexporter.demo.course import Course
from gradexporter.demo.scenarios import DEFAULT_SCENARIO, DEFAULT_SEED, SCENARIOS
from gradexporter.demo.training import Training
from gradexporter.demo.words import number
from gradexporter.records import State, StepReport

FOLDER = Path(__file__).resolve().parent.parent / ".github"

# Backgrounds are GitHub's own, so that the picture has no visible edge; lines are told apart without colour vision.
THEMES = {
    "light": {
        "background": "#ffffff",
        "text": "#1f2328",
        "dim": "#656d76",
        "grid": "#e7eaee",
        "lines": ("#0072b2", "#d55e00", "#008060"),
        State.WARMING_UP: "#8c959f",
        State.HEALTHY: "#2da44e",
        State.SPIKE: "#d4a72c",
        State.CASCADE: "#cf222e",
        State.NONFINITE: "#8250df",
    },
    "dark": {
        "background": "#0d1117",
        "text": "#e6edf3",
        "dim": "#8d96a0",
        "grid": "#21262d",
        "lines": ("#58b4f0", "#f0883e", "#3fcf9f"),
        State.WARMING_UP: "#57606a",
        State.HEALTHY: "#3fb950",
        State.SPIKE: "#d29922",
        State.CASCADE: "#f85149",
        State.NONFINITE: "#bc8cff",
    },
}

LINES: tuple[tuple[str, Callable[[StepReport], float | None]], ...] = (
    ("loss", lambda report: report.loss),
    ("gradient norm", lambda report: report.gradient_norm),
    ("largest activation", lambda report: report.activation_max_abs),
)


def main() -> None:
    """Runs the demo once and writes one picture a theme."""
    course, reports = played()
    for name, theme in THEMES.items():
        path = FOLDER / f"cascade-{name}.png"
        draw(course, reports, theme, path)
        print(path)


def played() -> tuple[Course, list[StepReport]]:
    """The run of ``gradexporter demo`` with the reports of all its steps."""
    scenario = SCENARIOS[DEFAULT_SCENARIO]
    training, course, reports = Training(scenario, DEFAULT_SEED), Course(scenario.name, DEFAULT_SEED), []
    with watch(training.model, training.optimizer, serve=False, activation_every=1, state_every=1) as monitor:
        for _ in range(scenario.steps):
            training.step(monitor)
            monitor.flush()
            assert monitor.report is not None
            course.add(monitor.report)
            reports.append(monitor.report)
    return course, reports


def draw(course: Course, reports: Sequence[StepReport], theme: dict[object, object], path: Path) -> None:
    """The run on one log axis, the three steps that matter in a staircase, and the states underneath."""
    pyplot.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10.5, "text.color": theme["text"]})
    figure, (axes, strip) = pyplot.subplots(
        2, 1, figsize=(10, 4.9), height_ratios=(16, 1), sharex=True, facecolor=theme["background"]
    )
    figure.subplots_adjust(left=0.065, right=0.985, top=0.84, bottom=0.11, hspace=0.07)
    outcome = course.outcome
    figure.text(0.02, 0.945, "A training run dies, and is flagged before it does", fontsize=15, fontweight="bold")
    figure.text(
        0.02,
        0.885,
        f"gradexporter demo, seed {course.seed}: flagged at step {outcome.spike_step}, "
        f"first NaN at step {outcome.first_nonfinite_step}, {outcome.lead_steps} steps later",
        color=theme["dim"],
    )
    _lines(axes, reports, theme)
    _marks(axes, course, theme)
    _states(strip, reports, theme)
    figure.savefig(path, dpi=180, facecolor=theme["background"], metadata={"Software": None})
    pyplot.close(figure)


def _lines(axes: Axes, reports: Sequence[StepReport], theme: dict[object, object]) -> None:
    axes.set_facecolor(theme["background"])
    axes.set_yscale("log")
    axes.set_ylim(1e-1, 1e24)
    axes.set_xlim(0.5, reports[-1].step + 0.5)
    axes.set_yticks([10.0**power for power in range(0, 25, 4)])
    axes.minorticks_off()
    axes.grid(axis="y", color=theme["grid"], linewidth=0.8)
    axes.tick_params(colors=theme["dim"], length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for (name, read), color in zip(LINES, theme["lines"], strict=True):
        points = [(report.step, read(report)) for report in reports]
        kept = [(step, value) for step, value in points if value is not None and math.isfinite(value) and value > 0]
        axes.plot(*zip(*kept, strict=True), color=color, linewidth=2, label=name, solid_capstyle="round")
    axes.legend(
        loc="upper left", frameon=False, labelcolor=theme["text"], handlelength=1.4, borderaxespad=0.2, fontsize=10.5
    )


def _marks(axes: Axes, course: Course, theme: dict[object, object]) -> None:
    outcome, jump = course.outcome, course.jump
    assert course.alarm is not None
    assert jump is not None
    assert outcome.first_nonfinite is not None
    place = outcome.first_nonfinite
    notes = (
        (
            course.alarm.step,
            1e9,
            theme[State.CASCADE],
            f"step {course.alarm.step}: flagged\ngradient {number(course.alarm.gradient_spike_ratio)} times its usual",
        ),
        (
            jump.calm.step,
            1e15,
            theme["dim"],
            f"step {jump.calm.step} looks calm: loss {number(jump.calm.loss)}\n"
            f"the next gradient is {number(jump.factor)} times as large",
        ),
        (place.step, 1e21, theme[State.NONFINITE], f"step {place.step}: NaN\n{place.quantity} of layer {place.layer}"),
    )
    for step, height, color, text in notes:
        axes.plot((step, step), (1e-1, 3 * height), color=color, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            text,
            (step, height),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=color if color != theme["dim"] else theme["text"],
            fontsize=10,
            linespacing=1.35,
            bbox={"facecolor": theme["background"], "edgecolor": "none", "pad": 1.5},
        )


def _states(strip: Axes, reports: Sequence[StepReport], theme: dict[object, object]) -> None:
    strip.set_facecolor(theme["background"])
    strip.set_yticks([])
    strip.set_ylim(0, 1)
    strip.tick_params(colors=theme["dim"], length=0, pad=5)
    strip.set_xticks([1, *range(8, reports[-1].step + 1, 8)])
    strip.set_xlabel("step", color=theme["dim"], labelpad=2)
    for spine in strip.spines.values():
        spine.set_visible(False)
    for state, group in groupby(reports, key=lambda report: report.state or State.WARMING_UP):
        steps = [report.step for report in group]
        first, last = steps[0] - 0.5, steps[-1] + 0.5
        strip.axvspan(first, last, color=theme[state], linewidth=0)
        strip.text(
            (first + last) / 2,
            0.46,
            str(state).replace("_", " "),
            ha="center",
            va="center",
            color=theme["background"],
            fontsize=9,
            fontweight="bold",
            clip_on=True,
        )


if __name__ == "__main__":
    main()
