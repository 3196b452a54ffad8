"""What the dashboard of one run asks, as PromQL with Grafana's variables in it."""

from __future__ import annotations

from collections.abc import Mapping

from gradexporter import metrics
from gradexporter.bundle.promql import Matcher, Pattern, series
from gradexporter.metrics import MetricSpec

NOTHING = -1
"""What ``or_nothing`` answers where a series is absent; a mapping gives it words."""

RANGE = "$__range"
RATE_INTERVAL = "$__rate_interval"

IN_NAMESPACE: Mapping[str, Matcher] = {"namespace": Pattern("$namespace")}
OF_RUN: Mapping[str, Matcher] = {**IN_NAMESPACE, "run_id": "$run"}
SELECTED: Mapping[str, Matcher] = {**OF_RUN, "rank": Pattern("$rank")}

NAMESPACES = f"max by (namespace) (last_over_time({series(metrics.RUN_INFO, window=RANGE)}))"
RANKS = f"max by (rank) (last_over_time({series(metrics.RUN_INFO, OF_RUN, window=RANGE)}))"
RUNS = (
    f"sort_desc(max by (run_id) (last_over_time({series(metrics.LAST_STEP_TIMESTAMP, IN_NAMESPACE, window=RANGE)}))"
    f" or max by (run_id) (last_over_time({series(metrics.RUN_INFO, IN_NAMESPACE, window=RANGE)})))"
)
"""The run that stepped last first, those without a step at the end."""

ALERTS = 'ALERTS{alertname=~"Gradexporter.+", alertstate="firing", namespace=~"$namespace", run_id="$run"}'


def now(spec: MetricSpec) -> str:
    """The series as it is at each point."""
    return series(spec, SELECTED)


def over_range(function: str, spec: MetricSpec) -> str:
    """One value for the whole time range."""
    return f"{function}({series(spec, SELECTED, window=RANGE)})"


def rate(spec: MetricSpec, matchers: Mapping[str, Matcher] = SELECTED) -> str:
    """Per second."""
    return f"rate({series(spec, matchers, window=RATE_INTERVAL)})"


def increase(spec: MetricSpec, part: str = "") -> str:
    """By how much a counter grew up to each point."""
    return f"increase({series(spec, SELECTED, window=RATE_INTERVAL, part=part)})"


def steps_per_second() -> str:
    """Steps a second of each rank, skipped ones too."""
    return f"sum without (outcome) ({rate(metrics.STEPS_TOTAL)})"


def skipped_per_second() -> str:
    """Skipped steps a second of each rank."""
    return f"sum without (outcome) ({rate(metrics.STEPS_TOTAL, {**SELECTED, 'outcome': 'skipped'})})"


def or_nothing(aggregate: str, spec: MetricSpec) -> str:
    """NOTHING while the run reports but this series is absent: an empty panel then means a broken one."""
    return f"{aggregate}({now(spec)}) or max({now(metrics.STEP)}) * 0 + {NOTHING}"


def or_one(aggregate: str, spec: MetricSpec) -> str:
    """1 while the run reports but this series is absent."""
    return f"{aggregate}({now(spec)}) or max({now(metrics.STEP)}) * 0 + 1"


def worst_layers(spec: MetricSpec, count: int) -> str:
    """The layers that were largest in the range, the same at every point; a plain topk would choose anew at each."""
    worst = f"max by (layer) (max_over_time({series(spec, SELECTED, window=RANGE)} @ end()))"
    return f"max by (layer) ({now(spec)}) and on (layer) topk({count}, {worst})"


def moments() -> str:
    """Momentum and second moment as one query: an optimizer may have only one of them."""
    named = ((metrics.MOMENTUM_MAX_ABS, "momentum"), (metrics.SECOND_MOMENT_MAX_ABS, "second moment"))
    return " or ".join(f'label_replace(max({now(spec)}), "moment", "{name}", "", "")' for spec, name in named)


def first_nonfinite() -> str:
    """Where each rank had its first non-finite value, and its step as the value, the earliest first."""
    place = f"min by (attempt, rank, layer, quantity) ({over_range('last_over_time', metrics.FIRST_NONFINITE_INFO)})"
    step = f"min by (attempt, rank) ({over_range('last_over_time', metrics.FIRST_NONFINITE_STEP)})"
    return f"sort({place} * on (attempt, rank) group_left () {step})"
