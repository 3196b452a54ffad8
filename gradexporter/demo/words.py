"""The run in words and numbers: rows, facts and the verdict, the same on a screen and in a log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.text import Text

from gradexporter.demo.course import Course, Outcome
from gradexporter.records import State, StepReport

COLUMNS = ("step", "loss", "grad norm", "ratio", "activation", "momentum", "parameter", "state")
"""Per step: the gradient's L2 norm, how many times its baseline that is, and three largest magnitudes."""

STYLES = {
    State.WARMING_UP: "bright_black",
    State.HEALTHY: "green",
    State.SPIKE: "yellow",
    State.CASCADE: "bold red",
    State.NONFINITE: "bold magenta",
}
"""Colour of each state; the word always stands beside it."""

OUTCOME_COLUMNS = (
    "seed",
    "spike",
    "cascade",
    "non-finite",
    "lead",
    "first non-finite value",
    "shape",
    "last healthy",
)

_BARS = "▁▂▃▄▅▆▇█"
_BARS_ASCII = "._-=+*%#"

_CALM_BAR = 1
"""Bar of the usual norm; each bar above is half a decade."""


def cells(report: StepReport) -> tuple[str, ...]:
    """The report as one row of ``COLUMNS``."""
    ratio = report.gradient_spike_ratio
    return (
        str(report.step),
        number(report.loss),
        number(report.gradient_norm),
        number(ratio) + ("x" if ratio is not None and math.isfinite(ratio) else ""),
        number(report.activation_max_abs),
        number(report.momentum_max_abs),
        number(report.parameter_max_abs),
        "" if report.state is None else report.state.value,
    )


def number(value: float | None) -> str:
    """Three digits, readable from 1e-300 to NaN; ``-`` for what was not observed."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    return f"{value:.{max(0, 2 - power)}f}" if -3 <= power <= 4 else f"{mantissa}e{power}"


def sparkline(norms: Sequence[tuple[float, State]], width: int, unicode: bool = True) -> Text:
    """The gradient norm over the steps on a log scale, coloured by state, a cross where it is not finite.

    A run longer than ``width`` shows the largest norm and the worst state of neighbouring steps.
    """
    bars, cross = (_BARS, "×") if unicode else (_BARS_ASCII, "x")
    calm = [norm for norm, state in norms if state.code <= State.HEALTHY.code and 0 < norm < math.inf]
    usual = statistics.median(calm) if calm else 1.0
    line = Text()
    for norm, state in _condensed(norms, width):
        if not math.isfinite(norm):
            line.append(cross, style=STYLES[State.NONFINITE])
            continue
        level = _CALM_BAR + round(2 * math.log10(norm / usual)) if norm > 0 else 0
        line.append(bars[max(0, min(len(bars) - 1, level))], style=STYLES[state])
    return line


def verdict(course: Course) -> tuple[str, State]:
    """The run in one sentence, and the state whose colour it takes."""
    outcome = course.outcome
    alarm, lost, lead = course.alarm, outcome.first_nonfinite_step, outcome.lead_steps
    if lost is not None and alarm is not None and lead:
        return f"Flagged at step {alarm.step}, non-finite at step {lost}: {_steps(lead)} ahead.", State.NONFINITE
    if lost is not None:
        return f"Non-finite at step {lost}, without a finite warning.", State.NONFINITE
    if alarm is not None:
        return f"Flagged at step {alarm.step}, and finite after all {_steps(course.steps)}.", State.SPIKE
    if outcome.shape is not None:
        return f"Finite after all {_steps(course.steps)}, but not well: {outcome.shape}.", State.SPIKE
    return f"Nothing to report in {_steps(course.steps)}.", State.HEALTHY


def facts(course: Course) -> Iterator[tuple[str, str]]:
    """What happened, as names and values."""
    outcome = course.outcome
    if course.alarm is not None:
        yield "first alarm", f"step {course.alarm.step}: {told(course.alarm)}"
    if outcome.cascade_step is not None and outcome.cascade_step != outcome.spike_step:
        yield "cascade", f"step {outcome.cascade_step}"
    if outcome.first_nonfinite is not None:
        yield "first non-finite", f"step {outcome.first_nonfinite_step}: {_place(outcome)}"
    if outcome.lead_steps is not None:
        yield "lead", _steps(outcome.lead_steps)
    yield "shape", _or_dash(outcome.shape)
    yield "last healthy step", _or_dash(outcome.last_healthy_step)
    if course.jump is not None:
        calm, hot = course.jump.calm, course.jump.hot
        yield (
            "looked calm",
            f"step {calm.step}: loss {number(calm.loss)}, gradient norm {number(calm.gradient_norm)}; "
            f"one step later {number(hot.gradient_norm)}, {number(course.jump.factor)}x",
        )


def lists(course: Course) -> Iterator[tuple[str, Sequence[str]]]:
    """The diagnosis' own lines under their headings, as far as there are any."""
    diagnosis = None if course.last is None else course.last.diagnosis
    if diagnosis is not None and diagnosis.evidence:
        yield "Evidence", diagnosis.evidence
    if diagnosis is not None and diagnosis.advice:
        yield "What to do", diagnosis.advice


def told(report: StepReport) -> str:
    """What is to be said about the step at which a run changed its state."""
    first = report.first_nonfinite
    if first is not None and first.step == report.step:
        return f"first non-finite value: {_where(first.layer, str(first.quantity))}"
    text = f"gradient norm {number(report.gradient_norm)}"
    if report.gradient_spike_ratio is not None:
        text += f", {number(report.gradient_spike_ratio)}x its baseline"
    loudest = max(report.findings, key=lambda finding: finding.severity.code, default=None)
    return text if loudest is None or loudest.layer is None else f"{text}, worst in layer {loudest.layer}"


def row(outcome: Outcome) -> tuple[str, ...]:
    """The outcome as one row of ``OUTCOME_COLUMNS``."""
    return (
        str(outcome.seed),
        _or_dash(outcome.spike_step),
        _or_dash(outcome.cascade_step),
        _or_dash(outcome.first_nonfinite_step),
        _or_dash(outcome.lead_steps),
        _place(outcome),
        _or_dash(outcome.shape),
        _or_dash(outcome.last_healthy_step),
    )


def _place(outcome: Outcome) -> str:
    place = outcome.first_nonfinite
    return "-" if place is None else _where(place.layer, str(place.quantity))


def _where(layer: str, quantity: str) -> str:
    return layer if layer == quantity else f"{quantity.replace('_', ' ')} of layer {layer}"


def _condensed(norms: Sequence[tuple[float, State]], width: int) -> Iterator[tuple[float, State]]:
    if len(norms) <= width:
        yield from norms
        return
    for column in range(width):
        group = norms[column * len(norms) // width : (column + 1) * len(norms) // width]
        values = [norm for norm, _ in group]
        worst = math.nan if any(not math.isfinite(value) for value in values) else max(values)
        yield worst, max((state for _, state in group), key=lambda state: state.code)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
