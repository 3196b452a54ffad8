"""Where people see it: a live screen on a terminal, plain lines everywhere else.

Both tell the same story from the same reports; only the live screen uses control codes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradexporter.demo.course import Course, Outcome
from gradexporter.demo.scenarios import Scenario
from gradexporter.demo.words import (
    COLUMNS,
    OUTCOME_COLUMNS,
    STYLES,
    cells,
    facts,
    lists,
    row,
    sparkline,
    told,
    verdict,
)
from gradexporter.records import State, StepReport

_DIM = "bright_black"

_WIDTHS = (5, 9, 9, 9, 10, 9, 9, 10)

_GAP = 2

_SPARE = (5, 6, 4, 3)
"""Columns that a narrow terminal does without, the first to go first."""

_LINES_BESIDE_TABLE = 15

_TURNS_SHOWN = 5


class View(Protocol):
    """Shows one run while it goes on, and then what came of it."""

    def begin(self, url: str | None, run_id: str) -> None:
        """Before the first step; ``url`` is None where nothing is served."""

    def step(self, course: Course) -> None:
        """After every step."""

    def end(self, course: Course) -> None:
        """After the last step, also of a run that was interrupted."""

    def say(self, text: str) -> None:
        """One more sentence for the reader."""


class Silent:
    """Shows nothing: for ``--json``."""

    def begin(self, url: str | None, run_id: str) -> None:
        """Nothing."""

    def step(self, course: Course) -> None:
        """Nothing."""

    def end(self, course: Course) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class Plain:
    """Lines for a pipe, a log or a dumb terminal: every step that matters, the others in samples."""

    def __init__(self, console: Console, scenario: Scenario, seed: int, steps: int) -> None:
        self._console = console
        self._scenario, self._seed, self._steps = scenario, seed, steps
        self._every = max(1, steps // 8)
        self._turns = 0

    def begin(self, url: str | None, run_id: str) -> None:
        """The heading."""
        self.say(f"gradexporter demo: {self._scenario.name}, seed {self._seed}, {self._steps} steps")
        self.say(self._scenario.story)
        if url is not None:
            self.say(f"run {run_id} is served at {url}/metrics")
        self.say("")
        self.say(_aligned(COLUMNS))

    def step(self, course: Course) -> None:
        """A line, if the run is unwell, changed its state, or it is time for one."""
        report = course.last
        if report is None:
            return
        turned, self._turns = len(course.turns) > self._turns, len(course.turns)
        unwell = report.state in (State.SPIKE, State.CASCADE)
        if turned or unwell or course.steps % self._every == 0 or course.steps == self._steps:
            self.say(_aligned(cells(report)))

    def end(self, course: Course) -> None:
        """The summary."""
        self.say("")
        self.say(verdict(course)[0])
        for name, fact in facts(course):
            self.say(f"  {name:<18}{fact}")
        self.say(f"  {'gradient norm':<18}{sparkline(course.norms, 64, _unicode(self._console)).plain}")
        for head, lines in lists(course):
            self.say(f"\n{head}")
            for line in lines:
                self.say(f"  - {line}")

    def say(self, text: str) -> None:
        """One line."""
        self._console.file.write(text.rstrip() + "\n")
        self._console.file.flush()


class Screen:
    """A live table of the last steps with a sparkline of the norm, redrawn after each step."""

    def __init__(self, console: Console, scenario: Scenario, seed: int, steps: int) -> None:
        self._console = console
        self._scenario, self._seed, self._steps = scenario, seed, steps
        self._rows: deque[StepReport] = deque(maxlen=max(3, min(12, console.height - _LINES_BESIDE_TABLE)))
        self._url: str | None = None
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def begin(self, url: str | None, run_id: str) -> None:
        """The empty screen."""
        self._url = url
        self._console.print()
        self._live.start()

    def step(self, course: Course) -> None:
        """The screen after one more step."""
        if course.last is not None:
            self._rows.append(course.last)
        self._live.update(self._frame(course), refresh=True)

    def end(self, course: Course) -> None:
        """Leaves the last frame standing and prints the summary under it."""
        self._live.stop()
        text, state = verdict(course)
        table = Table.grid(padding=(0, _GAP, 0, 0))
        for name, fact in facts(course):
            table.add_row(Text(name, style=_DIM), fact)
        parts: list[RenderableType] = [Text(), Text(text, style=f"bold {STYLES[state]}"), _indented(table)]
        for head, lines in lists(course):
            points = Table.grid(padding=(0, 1, 0, 0))
            for line in lines:
                points.add_row("-", line)
            parts += [Text(), Text(head, style="bold"), _indented(points)]
        self._console.print(_indented(Group(*parts, Text())), highlight=False)

    def say(self, text: str) -> None:
        """One sentence under everything."""
        self._console.print(_indented(Text(text, style=_DIM)))

    def _frame(self, course: Course) -> RenderableType:
        width = min(self._console.width - 2 * _GAP, 92)
        title = _line(("gradexporter", "bold"), f"  {self._scenario.name}, seed {self._seed}")
        parts: list[RenderableType] = [title, _line((self._scenario.story, _DIM))]
        if self._url is not None:
            parts.append(_line(("serving ", _DIM), (f"{self._url}/metrics", "cyan underline")))
        parts += [Text(), self._table(width), Text(), *self._spark(course, width), Text(), *_turns(course)]
        return _indented(Group(*parts))

    def _table(self, width: int) -> Table:
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style=_DIM, pad_edge=False)
        shown = _columns_that_fit(width)
        for index in shown:
            last = index == len(COLUMNS) - 1
            table.add_column(COLUMNS[index], justify="left" if last else "right", min_width=_WIDTHS[index])
        for report in self._rows:
            texts = cells(report)
            line = [Text(texts[index], style="bold" if report is self._rows[-1] else "") for index in shown]
            line[-1].stylize(_style(report))
            if report.state is not None and report.state.code >= State.SPIKE.code:
                line[shown.index(2)].stylize(_style(report))
            table.add_row(*line)
        for _ in range((self._rows.maxlen or 0) - len(self._rows)):
            table.add_row()
        return table

    def _spark(self, course: Course, width: int) -> Iterator[Text]:
        most = width - len("norm  ")
        drawn = sparkline(course.norms, most, _unicode(self._console))
        to_come = "." if self._console.options.ascii_only else "·"
        room = max(0, min(most, self._steps) - len(drawn))
        yield _line(("norm  ", _DIM), drawn, (to_come * room, _DIM))
        yield _line((f"      step {course.steps} of {self._steps}; one bar is half a decade", _DIM))


def outcomes_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Prints one line a run and a count of those that went non-finite."""
    rows = [row(outcome) for outcome in outcomes]
    lost = sum(outcome.first_nonfinite is not None for outcome in outcomes)
    summary = f"{lost} of {len(outcomes)} runs went non-finite."
    if live(console):
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style=_DIM, pad_edge=False)
        for index, head in enumerate(OUTCOME_COLUMNS):
            table.add_column(head, justify="left" if index in (5, 6) else "right")
        for outcome, line in zip(outcomes, rows, strict=True):
            table.add_row(*line, style="" if outcome.first_nonfinite is not None else _DIM)
        console.print(_indented(Group(Text(), table, Text(), Text(summary), Text())), highlight=False)
        return
    lines = [OUTCOME_COLUMNS, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(OUTCOME_COLUMNS))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.file.write("  ".join(padded).rstrip() + "\n")
    console.file.write(f"\n{summary}\n")


def console(stream: TextIO) -> Console:
    """A console on this stream."""
    return Console(file=stream, highlight=False)


def live(console: Console) -> bool:
    """Whether the console may be redrawn."""
    return console.is_terminal and not console.is_dumb_terminal


def loading(console: Console, what: str) -> AbstractContextManager[object]:
    """Says that something is being loaded, on a terminal only."""
    return console.status(f"loading {what}") if live(console) else nullcontext()


def _turns(course: Course) -> Iterator[Text]:
    for turn in course.turns[-_TURNS_SHOWN:]:
        state = f"{turn.report.state or '':<12}"
        yield _line((f"step {turn.report.step:>4}  ", _DIM), (state, _style(turn.report)), told(turn.report))
    for _ in range(_TURNS_SHOWN - 1 - len(course.turns)):
        yield Text()


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    """Text that is cut rather than wrapped: the height of the screen must not depend on it."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _columns_that_fit(width: int) -> list[int]:
    shown = list(range(len(COLUMNS)))
    for spare in _SPARE:
        if sum(_WIDTHS[index] + _GAP for index in shown) <= width:
            break
        shown.remove(spare)
    return shown


def _aligned(line: Sequence[str]) -> str:
    numbers = " ".join(cell.rjust(width) for cell, width in zip(line[:-1], _WIDTHS[:-1], strict=True))
    return f"{numbers}  {line[-1]}"


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, _GAP))


def _style(report: StepReport) -> str:
    return "" if report.state is None else STYLES[report.state]


def _unicode(console: Console) -> bool:
    return not console.options.ascii_only
