"""Plays a scenario in front of somebody: the run watched, shown, served and held, or several runs in a row."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress

from gradexporter.config import ConfigError, GradexporterError, resolve
from gradexporter.demo.course import Course, Outcome
from gradexporter.demo.scenarios import DEFAULT_SCENARIO, DEFAULT_SEED, SCENARIOS, Scenario
from gradexporter.demo.terminal import Plain, Screen, Silent, View, live, outcomes_table
from gradexporter.demo.training import Training
from gradexporter.monitor import Monitor, watch

PACE_SECONDS = 0.1
"""Per step on a terminal, where a run at full speed would be over before anybody has looked."""

INTERRUPTED = 128
"""Plus the number of the signal: exit status of a run that was stopped before its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to play and how."""

    scenario: str = DEFAULT_SCENARIO
    seeds: tuple[int, ...] = (DEFAULT_SEED,)
    series: bool = False
    """Runs of several seeds: a table or a list at the end, and no endpoint."""
    steps: int | None = None
    """None: as many as the scenario takes."""
    step_seconds: float | None = None
    """Least duration of a step; None: ``PACE_SECONDS`` on a terminal, else full speed."""
    hold_seconds: float | None = None
    """How long the endpoint stays up after the last step; None leaves it to the settings of ``watch``."""
    port: int | None = None
    as_json: bool = False


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; carries its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def play(options: Options, out: Console, err: Console) -> int:
    """Runs the demo and returns the exit status: 0, or 128 plus the signal that stopped it early."""
    if resolve({}).disabled:
        raise ConfigError("GRADEXPORTER_DISABLED is set, so the demo would have nothing to show; unset it")
    scenario = SCENARIOS[options.scenario]
    watched = live(out) and not options.as_json and not options.series
    with _signals(), _quiet_log() if watched or options.series else nullcontext():
        if options.series:
            return _several(options, scenario, out, err)
        return _one(options, scenario, out, err, watched)


def _one(options: Options, scenario: Scenario, out: Console, err: Console, watched: bool) -> int:
    seed = options.seeds[0]
    steps = options.steps or scenario.steps
    view: View = Silent() if options.as_json else (Screen if watched else Plain)(out, scenario, seed, steps)
    pace = options.step_seconds
    if pace is None:
        pace = PACE_SECONDS if watched else 0.0
    course = Course(scenario.name, seed)
    training = Training(scenario, seed)
    try:
        with watch(training.model, training.optimizer, **_settings(options)) as monitor:
            view.begin(monitor.url, monitor.snapshot.identity.run_id if monitor.snapshot else "")
            for _ in _paced(range(steps), pace, err if options.as_json else None):
                _advance(training, monitor, course)
                view.step(course)
            _tell(options, view, out, course)
            _confess(monitor, view)
            if options.hold_seconds and monitor.url is not None:
                view.say(f"The final state stays at {monitor.url} for {options.hold_seconds:g} s; Ctrl-C ends it.")
            monitor.close(hold=options.hold_seconds)
    except Stopped as stopped:
        if course.steps == steps:
            return 0
        _tell(options, view, out, course)
        return INTERRUPTED + stopped.number
    return 0


def _settings(options: Options) -> dict[str, Any]:
    # A port that nobody gave is left out, so that the environment may give it.
    port = {} if options.port is None else {"port": options.port}
    return {"activation_every": 1, "state_every": 1, **port}


def _tell(options: Options, view: View, out: Console, course: Course) -> None:
    view.end(course)
    if options.as_json:
        _print_json(out, course.outcome.as_json())


def _confess(monitor: Monitor, view: View) -> None:
    failures = monitor.snapshot.itself.failures if monitor.snapshot else {}
    for part, count in failures.items():
        if count:
            view.say(f"gradexporter itself failed {count} times in {part}, and the run went on.")


def _several(options: Options, scenario: Scenario, out: Console, err: Console) -> int:
    steps = options.steps or scenario.steps
    outcomes: list[Outcome] = []
    status = 0
    try:
        for seed in _paced(options.seeds, 0.0, err):
            outcomes.append(outcome_of(scenario, seed, steps, options.step_seconds or 0.0))
    except Stopped as stopped:
        status = INTERRUPTED + stopped.number
    if options.as_json:
        _print_json(out, [outcome.as_json() for outcome in outcomes])
    else:
        outcomes_table(out, outcomes)
    return status


def outcome_of(scenario: Scenario, seed: int, steps: int, step_seconds: float = 0.0) -> Outcome:
    """What a run amounts to, watched without an endpoint."""
    course = Course(scenario.name, seed)
    training = Training(scenario, seed)
    with watch(training.model, training.optimizer, serve=False, activation_every=1, state_every=1) as monitor:
        for _ in _paced(range(steps), step_seconds, None):
            _advance(training, monitor, course)
    return course.outcome


def _advance(training: Training, monitor: Monitor, course: Course) -> None:
    training.step(monitor)
    monitor.flush()
    report = monitor.report
    if report is None or report is course.last:
        raise GradexporterError(f"step {course.steps + 1} was not judged; the log says why")
    course.add(report)


def _paced(items: Sequence[int], seconds: float, err: Console | None) -> Iterator[int]:
    """The items, each taking at least ``seconds``, with a progress bar on ``err`` if that is a terminal."""
    with Progress(console=err, transient=True, disable=err is None or not live(err)) as progress:
        task = progress.add_task("training", total=len(items))
        for item in items:
            began = time.monotonic()
            yield item
            progress.advance(task)
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))


def _print_json(out: Console, value: object) -> None:
    out.file.write(json.dumps(value) + "\n")
    out.file.flush()


@contextmanager
def _signals() -> Iterator[None]:
    """Turns SIGINT and SIGTERM into ``Stopped`` while the block runs."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Leaves the verdicts out of the log: a live screen tells them, and of several runs nobody knew whose they are."""
    log = logging.getLogger("gradexporter")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
