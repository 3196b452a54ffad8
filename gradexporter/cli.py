"""The command line: what can be asked for and what it is called; the work is done elsewhere.

Nothing heavy is imported before it is needed, so that ``--help`` and ``bundle`` start without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gradexporter import __version__, bundle
from gradexporter.config import GradexporterError
from gradexporter.demo.scenarios import DEFAULT_SCENARIO, DEFAULT_SEED, SCENARIOS

FAILED = 1
"""Exit status of a command that could not do its work; 2, from argparse, says that it was misused."""

_MOST = 2**31 - 1
_MOST_SEEDS = 10_000

_Value = TypeVar("_Value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    given, unknown = parser().parse_known_args(arguments)
    if unknown:  # parse_args would answer with the usage of the root, which names no option
        given.misused(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = given.run(given)
    except BrokenPipeError:
        # The reader of the output went away; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (GradexporterError, ImportError, OSError) as error:
        print(f"gradexporter: {error}", file=sys.stderr)
        return FAILED
    return status


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    root = argparse.ArgumentParser(
        prog="gradexporter",
        description="Per-layer training numerics, judged at every step, as Prometheus metrics and alerts.",
        epilog="Start with: gradexporter demo",
    )
    root.add_argument("--version", action="version", version=f"gradexporter {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bundle(commands)
    return root


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scenarios = "\n".join(f"  {scenario.name:<20} {scenario.story}" for scenario in SCENARIOS.values())
    demo = commands.add_parser(
        "demo",
        help="watch a training run die, steps before its NaN",
        description="Trains a small network that fails in a known way, and watches it.",
        epilog=f"scenarios:\n{scenarios}\n\n"
        "examples:\n"
        "  gradexporter demo\n"
        "  gradexporter demo --scenario bad_batch --step-seconds 0.5 --hold 60\n"
        "  gradexporter demo --seeds 0-9 --json\n\n"
        "exit status:\n"
        "  0 the run was played to its end, whatever became of it; 1 it could not be played;\n"
        "  2 the options are wrong; 130 or 143 it was stopped by Ctrl-C or SIGTERM before its last step",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default=DEFAULT_SCENARIO,
        metavar="NAME",
        help="what goes wrong, see below (default: %(default)s)",
    )
    seeds = demo.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=_whole(0), metavar="N", help=f"seed of the run (default: {DEFAULT_SEED})")
    seeds.add_argument(
        "--seeds", type=_seeds, metavar="LIST", help="one run for each of 0-9 or 0,1,6 in place of --seed; not served"
    )
    demo.add_argument("--steps", type=_whole(1), metavar="N", help="steps to train (default: the scenario's own)")
    demo.add_argument(
        "--step-seconds",
        type=_seconds,
        metavar="S",
        help="least duration of a step, to slow down to a real job's pace (default: 0.1 on a terminal, else 0)",
    )
    demo.add_argument(
        "--hold", type=_seconds, metavar="S", help="keep serving the final state for so long (default: 0)"
    )
    demo.add_argument(
        "--port",
        type=_whole(0, 65535),
        metavar="N",
        help="TCP port of the endpoint, 0 for any (default: 10420 plus the local rank); a taken one moves on",
    )
    demo.add_argument("--json", action="store_true", help="print the outcome as JSON and nothing else")
    demo.set_defaults(run=_demo, misused=demo.error)


def _demo(given: argparse.Namespace) -> int:
    if given.seeds is not None:
        for option, value in (("--port", given.port), ("--hold", given.hold)):
            if value is not None:
                given.misused(f"{option} has no use with --seeds, whose runs are not served; drop one of the two")
    from gradexporter.demo.terminal import console, loading

    out, err = console(sys.stdout), console(sys.stderr)
    with loading(err, "PyTorch and scikit-learn"):
        from gradexporter.demo.play import Options, play

    options = Options(
        scenario=given.scenario,
        seeds=given.seeds or (DEFAULT_SEED if given.seed is None else given.seed,),
        series=given.seeds is not None,
        steps=given.steps,
        step_seconds=given.step_seconds,
        hold_seconds=given.hold,
        port=given.port,
        as_json=given.json,
    )
    return play(options, out, err)


def _add_bundle(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bundle",
        help="write alert rules, dashboards, the chart's copies and the metrics table",
        description="Writes the files that are generated from the catalogue of series and the settings.",
        epilog="examples:\n"
        "  gradexporter bundle --only rules --output /etc/prometheus\n"
        "  gradexporter bundle --check\n\n"
        "exit status:\n"
        "  0 written, or with --check up to date; 1 something is out of date or cannot be written;\n"
        "  2 the options are wrong",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    command.add_argument("--only", choices=bundle.PARTS, help="one part in place of all")
    command.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="folder to write into (default: the current one)"
    )
    command.add_argument("--json", action="store_true", help="print the files as JSON")
    command.set_defaults(run=_bundle, misused=command.error)


def _bundle(given: argparse.Namespace) -> int:
    if given.check:
        stale = bundle.check(given.output, given.only)
        _tell(given.json, "stale", stale, "every generated file is up to date")
        if stale:
            print("gradexporter: out of date; rewrite with: gradexporter bundle", file=sys.stderr)
        return FAILED if stale else 0
    _tell(given.json, "written", bundle.write(given.output, given.only), "every generated file was up to date")
    return 0


def _tell(as_json: bool, word: str, entries: Sequence[str], otherwise: str) -> None:
    if as_json:
        print(json.dumps({word: [entry.splitlines()[0] for entry in entries]}))
        return
    for entry in entries:
        print(f"{word} {entry}")
    if not entries:
        print(otherwise)


def _whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    span = f"from {least}" if most == _MOST else f"from {least} to {most}"

    def read(text: str) -> int:
        value = _number(int, text)
        if value is None or not least <= value <= most:
            raise _unusable(text, f"give a whole number {span}")
        return value

    return read


def _seconds(text: str) -> float:
    value = _number(float, text)
    if value is None or not 0 <= value <= _MOST:
        raise _unusable(text, f"give seconds from 0 to {_MOST}, such as 0.5")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    seeds: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _number(int, first)
        high = _number(int, last) if dash else low
        if low is None or high is None or not 0 <= low <= high:
            raise _unusable(text, "give a range such as 0-9 or a list such as 0,1,6")
        if high > _MOST:
            raise _unusable(text, f"{high} is too large, the largest seed is {_MOST}")
        if high - low < _MOST_SEEDS:
            seeds.update(dict.fromkeys(range(low, high + 1)))
        if high - low >= _MOST_SEEDS or len(seeds) > _MOST_SEEDS:
            raise _unusable(text, f"give at most {_MOST_SEEDS} seeds, such as 0-9 or 0,1,6")
    return tuple(seeds)


def _number(read: Callable[[str], _Value], text: str) -> _Value | None:
    try:
        return read(text)
    except ValueError:
        return None


def _unusable(text: str, advice: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"cannot be {text!r}: {advice}")
