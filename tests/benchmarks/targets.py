"""What the figures are held against: shares of the bare step of the same run, on one CPU thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from budget import Budget
from exposition import Exposition
from measuring import Row
from memory import Memory

MODELS = ("mlp", "gpt", "conv", "many")

SHARES: dict[str, tuple[float, float, float, float]] = {
    "disabled": (0.001, 0.001, 0.001, 0.001),
    "gradients (stock)": (0.025, 0.008, 0.008, 0.10),
    "default (stock)": (0.045, 0.02, 0.045, 0.28),
    "default, scraped (stock)": (0.045, 0.02, 0.045, 0.28),
    "everything (stock)": (0.14, 0.06, 0.10, 0.70),
    "gradients (native)": (0.012, 0.004, 0.003, 0.06),
    "default (native)": (0.018, 0.007, 0.018, 0.11),
    "everything (native)": (0.05, 0.012, 0.025, 0.16),
}
"""Most that a contestant may cost on mlp, gpt, conv and many."""

CLIPS: dict[str, float] = {"own clip": 1.05, "gradients (stock)": 1.1, "gradients (native)": 0.5}
"""The same as multiples of torch's clip."""

PEAK_BYTES = 0
KEPT_BYTES = 64
PUBLISH_US = 50.0
SCRAPE_CPU_MS = 8.0
STALL_MS = 5.0
SLOWEST = 10
"""Steps between two full measurements at most."""
OVER_BUDGET = ("many",)
"""Models on which even the slowest cadence costs more than the budget, with stock kernels."""


@dataclass
class Check:
    """One figure and its limit."""

    what: str
    model: str
    value: float
    limit: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def checks(
    rows: Sequence[Row], memories: Iterable[Memory], exposition: Exposition | None, budgets: Iterable[Budget]
) -> list[Check]:
    """Every target that these figures say something about."""
    found: list[Check] = []
    for model in MODELS:
        found += _of_model(model, {row.contestant: row for row in rows if row.model == model})
    for memory in memories:
        found.append(Check("peak of tensor memory, added", memory.model, memory.extra_peak, PEAK_BYTES, "B"))
        kept = memory.kept_a_statistic
        found.append(Check("tensor memory kept, by layer and statistic", memory.model, kept, KEPT_BYTES, "B"))
    if exposition is not None:
        found.append(Check("publishing 10,000 values", "", exposition.publish_us, PUBLISH_US, "us"))
        found.append(Check("scrape of 10,000 series, CPU", "", exposition.scrape_cpu_ms, SCRAPE_CPU_MS, "ms"))
        stall = exposition.stall_ms - exposition.pause_ms
        found.append(Check("scrape of 10,000 series, stall", "", stall, STALL_MS, "ms"))
    for budget in budgets:
        over = budget.model in OVER_BUDGET
        found.append(Check("budget exceeded, and said so", budget.model, abs(budget.exceeded - over), 0, ""))
        most = budget.steps // (SLOWEST if over else budget.every) + 1
        found.append(Check("steps measured in full, of 20", budget.model, budget.full_steps, most, ""))
    return found


def _of_model(model: str, rows: Mapping[str, Row]) -> list[Check]:
    found = []
    noise = rows["nothing"].process.noise if "nothing" in rows else 0.0
    clip = rows.get("clip_grad_norm_")
    for name, row in rows.items():
        limit = SHARES[name][MODELS.index(model)] if name in SHARES else None
        if limit is not None and row.self_share is not None:
            found.append(Check(f"{name}, own CPU time", model, 100 * row.self_share, 100 * limit, "%"))
            # The median of the ratio less what the same step differs from itself: never below what is resolved.
            added = max(0.0, row.process.median - 1 - noise)
            found.append(Check(f"{name}, CPU time of the process", model, 100 * added, 100 * limit, "%"))
        if name in CLIPS and clip is not None and clip.self_ms and row.self_ms is not None:
            found.append(Check(f"{name}, in clips", model, row.self_ms / clip.self_ms, CLIPS[name], "x"))
    return found
