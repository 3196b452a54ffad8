"""Records the demo's own run for tests that need no torch: tests/data/demo_seed1.jsonl, one step a line.

A line holds what was measured, to six digits, and the state that the live run was judged to be in. Readings
that nobody took are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradexporter import StepReport, watch
from gradexporter.demo.scenarios import DEFAULT_SCENARIO, DEFAULT_SEED, SCENARIOS
from gradexporter.demo.training import Training
from gradexporter.records import to_plain

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / f"demo_seed{DEFAULT_SEED}.jsonl"

MEASURED = (
    "step",
    "loss",
    "gradient_norm",
    "gradient_max_abs",
    "activation_max_abs",
    "momentum_max_abs",
    "parameter_max_abs",
    "parameter_norm",
    "update_ratio",
    "learning_rate",
    "input_max_abs",
    "nonfinite",
)
"""What the demo has of a report; the rest the judge sets, or is about clocks and clipping."""

ON_LAYERS = (
    "gradient_norm",
    "gradient_nonfinite",
    "activation_max_abs",
    "activation_nonfinite",
    "parameter_max_abs",
    "update_ratio",
    "momentum_max_abs",
    "execution_order",
)


def record() -> Iterator[StepReport]:
    """The judged steps of the demo."""
    scenario = SCENARIOS[DEFAULT_SCENARIO]
    training = Training(scenario, DEFAULT_SEED)
    with watch(training.model, training.optimizer, serve=False, activation_every=1, state_every=1) as monitor:
        for _ in range(scenario.steps):
            training.step(monitor)
            monitor.flush()
            assert monitor.report is not None
            yield monitor.report


def line(report: StepReport) -> str:
    """One step as JSON, its layers in columns."""
    plain: dict[str, Any] = {name: to_plain(_rounded(getattr(report, name))) for name in MEASURED}
    plain["layers"] = {"layer": list(report.layers.names)} | {
        name: [to_plain(_rounded(getattr(row, name))) for row in report.layers.rows()] for name in ON_LAYERS
    }
    plain["state"] = to_plain(report.state)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(f"{line(report)}\n" for report in record()))
    print(f"wrote {FILE}")
