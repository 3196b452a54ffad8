"""Recorded training runs through the judge: who is warned in time, who for nothing, and what it is called.

``python tests/corpus_report.py FOLDER`` prints the figures that the tests assert.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradexporter.judge import Judge
from gradexporter.records import LayerTable, Shape, State, StepReport

# fmt: off
COLUMNS = (
    "loss", "gnorm", "gmax", "amax", "mmax", "pmax", "pnorm", "upd", "lr", "xmax", "xrms", "ymax", "xbad", "abad",
    "gbad", "pbad", "skipped", "probe_prev_on_cur", "probe_cur_on_prev", "smax", "yfloat",
)
# fmt: on
FIELDS = {
    "loss": "loss",
    "gnorm": "gradient_norm",
    "gmax": "gradient_max_abs",
    "amax": "activation_max_abs",
    "mmax": "momentum_max_abs",
    "pmax": "parameter_max_abs",
    "pnorm": "parameter_norm",
    "upd": "update_ratio",
    "lr": "learning_rate",
    "xmax": "input_max_abs",
}
COUNTS = {"xbad": "input", "abad": "activation", "gbad": "gradient", "pbad": "parameter"}
LAYER_FIELDS = ("gradient_norm", "activation_max_abs", "momentum_max_abs", "parameter_max_abs")

SHAPES: dict[str, set[Shape | None]] = {
    "healthy": {None},
    "spike_recovers": {Shape.SPIKE_RECOVERED},
    "batch_recovers": {Shape.SPIKE_RECOVERED, Shape.BAD_BATCH},
    "batch_silent": {None, Shape.SPIKE_RECOVERED, Shape.BAD_BATCH},
    "cascade": {Shape.SPIKE_CASCADE},
    "exploding": {Shape.EXPLODING_GRADIENT},
    "batch_fatal": {Shape.BAD_BATCH},
    "batch_overflow": {Shape.BAD_BATCH},
    "bad_input": {Shape.BAD_INPUT},
    "undefined_op": {Shape.UNDEFINED_OPERATION},
    "nan_step1": {Shape.NAN_FROM_START},
    "oscillation": {Shape.OSCILLATION},
    "vanishing": {Shape.DEAD_OR_VANISHING},
    "diverged_finite": {Shape.EXPLODING_GRADIENT, Shape.OSCILLATION, Shape.SPIKE_CASCADE},
}
"""Shapes that are right for each label in hindsight."""

HALF_PRECISION = ("exploding", "batch_fatal", "batch_overflow")
"""Labels that are also half_precision_overflow where activations are kept in float16."""

WARNED = ("cascade", "exploding", "batch_fatal")
"""Labels that were finite and odd before they were not finite."""


@dataclass(frozen=True)
class Run:
    name: str
    label: str
    nonfinite_step: int
    dtype_max: float
    steps: np.ndarray[Any, np.dtype[np.float64]]
    layers: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def right_shapes(self) -> set[Shape | None]:
        half = self.dtype_max < 1e6 and self.label in HALF_PRECISION
        return SHAPES[self.label] | ({Shape.HALF_PRECISION_OVERFLOW} if half else set())

    def reports(self) -> Iterator[StepReport]:
        names = tuple(f"layer{index}" for index in range(self.layers.shape[2]))
        observed = np.ones(len(names), dtype=bool)
        for step, (row, layers) in enumerate(zip(self.steps, self.layers, strict=True), start=1):
            values = dict(zip(COLUMNS, map(float, row), strict=True))
            columns = {name: (column, observed) for name, column in zip(LAYER_FIELDS, layers, strict=True)}
            yield StepReport(
                step=step,
                target_max_abs=values["ymax"] if values["yfloat"] else None,
                nonfinite={quantity: values[name] for name, quantity in COUNTS.items() if values[name]},
                applied=not values["skipped"],
                dtype_max=self.dtype_max,
                layers=LayerTable(names, columns),
                **{name: values[column] for column, name in FIELDS.items()},
            )


@dataclass
class Verdict:
    run: Run
    states: list[State]
    last: StepReport

    def first(self, *states: State) -> int:
        """The first step in one of these states, 0 for none."""
        return next((step for step, state in enumerate(self.states, start=1) if state in states), 0)

    @property
    def shape(self) -> Shape | None:
        return self.last.diagnosis.shape if self.last.diagnosis else None

    @property
    def is_right(self) -> bool:
        return self.shape in self.run.right_shapes

    @property
    def lead(self) -> int:
        """Steps from the cascade to the first value that was not finite; 0 if it was not seen coming."""
        cascade = self.first(State.CASCADE)
        return max(self.run.nonfinite_step - cascade, 0) if cascade else 0

    def events(self, *states: State) -> int:
        """How often the run went into one of these states."""
        inside = [state in states for state in self.states]
        return sum(now and not before for before, now in zip([False, *inside], inside, strict=False))


@dataclass
class Summary:
    verdicts: list[Verdict]
    leads: list[int] = field(init=False)
    healthy_steps: int = field(init=False)

    def __post_init__(self) -> None:
        doomed = [v for v in self.verdicts if v.run.label in WARNED and v.run.nonfinite_step]
        self.leads = sorted(verdict.lead for verdict in doomed)
        self.healthy = [verdict for verdict in self.verdicts if verdict.run.label == "healthy"]
        self.healthy_steps = sum(len(verdict.states) for verdict in self.healthy)

    @property
    def recall(self) -> float:
        return sum(lead > 0 for lead in self.leads) / len(self.leads)

    @property
    def lead_p10(self) -> float:
        return float(np.percentile(self.leads, 10, method="lower"))

    @property
    def accuracy(self) -> float:
        return sum(verdict.is_right for verdict in self.verdicts) / len(self.verdicts)

    def false_per_10000(self, *states: State) -> float:
        return 1e4 * sum(verdict.events(*states) for verdict in self.healthy) / self.healthy_steps

    def __str__(self) -> str:
        lines = [
            f"runs {len(self.verdicts)}, of which {len(self.leads)} went non-finite with a finite warning",
            f"cascade recall {self.recall:.3f}, lead in steps: p10 {self.lead_p10:.0f}, "
            f"median {np.median(self.leads):.0f}",
            f"per 10,000 of {self.healthy_steps} healthy steps: false cascades "
            f"{self.false_per_10000(State.CASCADE, State.NONFINITE):.1f}, "
            f"false spikes {self.false_per_10000(State.SPIKE):.1f}",
            f"shape accuracy {self.accuracy:.3f}",
            "",
            *self.confusion(),
            "",
            "wrong: " + ", ".join(f"{v.run.name} ({v.run.label}: {v.shape})" for v in self.verdicts if not v.is_right),
        ]
        return "\n".join(lines)

    def confusion(self) -> Iterator[str]:
        counts = Counter((verdict.run.label, str(verdict.shape or "-")) for verdict in self.verdicts)
        called = sorted({shape for _, shape in counts})
        heads = [shape[:12] for shape in called]
        yield f"{'label':16}" + "".join(f"{head:>14}" for head in heads)
        for label in SHAPES:
            if any(key[0] == label for key in counts):
                cells = (str(counts[label, shape] or ".") for shape in called)
                yield f"{label:16}" + "".join(f"{cell:>14}" for cell in cells)


def load(folder: Path) -> list[Run]:
    """The recorded runs of a folder with their labels."""
    with (folder / "labels.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    arrays = np.load(folder / "corpus_public.npz")
    return [
        Run(
            name=row["id"],
            label=row["label"],
            nonfinite_step=int(row["nf"]),
            dtype_max=float(row["dmax"]),
            steps=arrays[f"{row['id']}/G"].astype(np.float64),
            layers=arrays[f"{row['id']}/L"].astype(np.float64),
        )
        for row in rows
    ]


def judge(run: Run) -> Verdict:
    """A run from its first step to its last, by a judge of its own."""
    judge = Judge()
    judged = [judge(report) for report in run.reports()]
    states = [report.state for report in judged if report.state is not None]
    return Verdict(run, states, judged[-1])


def summarize(folder: Path) -> Summary:
    return Summary([judge(run) for run in load(folder)])


if __name__ == "__main__":
    print(summarize(Path(sys.argv[1])))
