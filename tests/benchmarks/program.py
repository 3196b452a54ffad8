"""What does gradexporter cost a training step? Prints a table, writes JSON, and checks every target.

Each contestant is compared with the same model without it in blocks that take turns, so that drift and noisy
neighbours cancel in the ratio of a pair. One torch thread. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path

import budget
import contestants
import exposition
import measuring
import memory
import targets
import torch
from models import BUILDERS, build
from rich.console import Console
from rich.table import Table

FULL = measuring.Effort(least_pairs=5, most_pairs=40, block_seconds=0.06, seconds=8.0)
QUICK = measuring.Effort(least_pairs=2, most_pairs=8, block_seconds=0.04, seconds=1.5)
TINY = measuring.Effort(least_pairs=1, most_pairs=2, block_seconds=0.0, seconds=0.0)

console = Console(width=None if sys.stdout.isatty() else 130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--model", default=",".join(BUILDERS), help="mlp, gpt, conv, many; several with commas")
    parser.add_argument("--only", default="", help="contestants with this in their name, besides floor and clip")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks: under three minutes")
    parser.add_argument("--tiny", action="store_true", help="small models and a pair or two: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    options = parser.parse_args()
    options.model = options.model.split(",")
    unknown = [name for name in options.model if name not in BUILDERS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}: choose from {', '.join(BUILDERS)}")
    return options


def rows_of(name: str, options: argparse.Namespace) -> list[measuring.Row]:
    subject = build(name, small=options.tiny)
    effort = TINY if options.tiny else QUICK if options.quick else FULL
    rows = []
    for contestant, make in contestants.contestants().items():
        if options.only not in contestant and contestant not in ("nothing", "clip_grad_norm_"):
            continue
        with console.status(f"{name}: {contestant}"):
            try:
                rows.append(measuring.measure(subject, contestant, make, effort=effort))
            except contestants.Unavailable as error:
                console.print(f"{name}: {contestant} is left out: {error}")
    return rows


def shown(rows: list[measuring.Row]) -> Table:
    table = Table(title=f"{rows[0].model}: bare step {rows[0].bare_ms:.2f} ms of CPU")
    for column in ("contestant", "own CPU, ms", "of the step", "process CPU ratio", "95 %", "wall ratio", "pairs"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for row in rows:
        own = ("-", "-") if row.self_ms is None else (f"{row.self_ms:.3f}", f"{100 * row.self_share:.2f} %")
        interval = f"{row.process.low:.3f} to {row.process.high:.3f}"
        ratio, wall = f"{row.process.median:.3f}", f"{row.wall.median:.3f}"
        table.add_row(row.contestant, *own, ratio, interval, wall, f"{row.pairs} x {row.steps}")
    return table


def checked(found: list[targets.Check]) -> Table:
    table = Table(title="targets")
    for column in ("what", "model", "figure", "limit", ""):
        table.add_column(column, justify="right" if column in ("figure", "limit") else "left")
    for check in found:
        verdict = "holds" if check.holds else "[bold red]missed[/]"
        figure, limit = f"{check.value:.3g} {check.unit}", f"{check.limit:.3g} {check.unit}"
        table.add_row(check.what, check.model, figure, limit, verdict)
    return table


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    began = time.monotonic()
    rows: list[measuring.Row] = []
    with contestants.cpu_clock():
        for name in options.model:
            rows += rows_of(name, options)
            console.print(shown([row for row in rows if row.model == name]))
    memories, budgets, exposed = [], [], None
    if not options.only:
        with console.status("memory, budget, exposition"):
            memories = [memory.measure(name, small=options.tiny) for name in options.model]
            # Not by CPU clock: what it spends is held against the time that a step takes.
            budgets = [budget.measure(name, small=options.tiny) for name in options.model]
            exposed = exposition.measure(240, 3) if options.tiny else exposition.measure()
    found = targets.checks(rows, memories, exposed, budgets)
    console.print(checked(found))
    if options.json:
        figures = {
            "conditions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "machine": platform.machine(),
                "processors": os.cpu_count(),
                "load": os.getloadavg()[0],
                "seconds": time.monotonic() - began,
            },
            "rows": [dataclasses.asdict(row) for row in rows],
            "memory": [dataclasses.asdict(one) for one in memories],
            "exposition": dataclasses.asdict(exposed) if exposed else None,
            "budget": [dataclasses.asdict(one) for one in budgets],
            "checks": [{**dataclasses.asdict(check), "holds": check.holds} for check in found],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    missed = sum(not check.holds for check in found)
    console.print(f"{len(found) - missed} of {len(found)} targets hold, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0
