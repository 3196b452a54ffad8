"""Stories of ranks as Prometheus would have scraped them, and promtool as the judge of what fires.

The test clock of promtool starts at 0, so that a timestamp near 0 would look recent: stories begin
their incidents at NOON.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gradexporter import metrics
from gradexporter.metrics import MetricSpec
from gradexporter.records import FindingKind, Quantity, State

SCRAPE = 15
"""Seconds between two scrapes and between two evaluations."""

NOON = 2400
"""When incidents begin: a multiple of SCRAPE, later than every window."""

Labels = Mapping[str, str]
Reading = Callable[[int], float | None]


@dataclass(kw_only=True)
class Rank:
    """What one rank shows over time; the default is a healthy rank that never ends."""

    run_id: str = "run-a"
    rank: int = 0
    attempt: str = "0"
    namespace: str = "ml"
    pod: str = ""
    paging: bool = True
    labels: Labels = field(default_factory=dict)
    born: int = 0
    gone: int | None = None
    """From here on its target does not answer; scrapes write stale markers."""
    blinks: tuple[int, ...] = ()
    """Scrapes that fail."""
    states: Sequence[tuple[int, State]] = ()
    findings: Mapping[FindingKind, Sequence[int]] = field(default_factory=dict)
    """Seconds of each finding; its series is born with the first."""
    ended: tuple[int, str] | None = None
    phases: Sequence[tuple[int, str]] = ()
    step_seconds: float = 1.0
    stuck: int | None = None
    """From here on no step closes."""
    norm: float = 3.0
    layers: Mapping[str, float] = field(default_factory=dict)
    """Spike ratio by layer, from NOON on."""
    first_nonfinite: tuple[int, int, str, Quantity] | None = None
    """Second, step, layer, quantity."""
    diagnosis: str | None = None
    last_healthy_step: int | None = None
    last_clean_checkpoint_step: int | None = None

    def series(self) -> list[tuple[MetricSpec, dict[str, str], Reading]]:
        """Every series that a rule may look at."""
        attempt = {"attempt": self.attempt}
        info = {**attempt, "paging": "on" if self.paging else "off", **self.labels}
        rows: list[tuple[MetricSpec, dict[str, str], Reading]] = [
            (metrics.RUN_INFO, info, lambda now: 1),
            (metrics.HEALTH_STATE, attempt, lambda now: _latest(self.states, now, State.HEALTHY).code),
            (metrics.GRADIENT_NORM, {}, lambda now: self.norm),
            (metrics.GRADIENT_SPIKE_RATIO_PEAK, {}, lambda now: 1 + self.rank),
            (metrics.STEP, {}, self._steps),
            (metrics.STEPS_TOTAL, {"outcome": "applied"}, self._steps),
            (metrics.STEPS_TOTAL, {"outcome": "skipped"}, lambda now: 0),
            (metrics.STEP_SECONDS_TOTAL, {}, lambda now: self._steps(now) * self.step_seconds),
            (metrics.LAST_STEP_TIMESTAMP, {}, lambda now: self.born + self._steps(now) * self.step_seconds),
        ]
        for reason in ("closed", "exception", "signal"):
            rows.append((metrics.RUN_ENDED, {"reason": reason}, self._ended(reason)))
        for phase in ("train", "eval", "checkpoint"):
            rows.append((metrics.RUN_PHASE, {"phase": phase}, self._in_phase(phase)))
        for kind in FindingKind:
            labels = {**attempt, "finding": str(kind)}
            times = self.findings.get(kind, ())
            rows.append((metrics.FINDINGS_TOTAL, labels, _count(times)))
            rows.append((metrics.LAST_FINDING_TIMESTAMP, labels, _last(times)))
        for layer, ratio in self.layers.items():
            rows.append((metrics.LAYER_SPIKE_RATIO, {"layer": layer}, _from(NOON, ratio)))
        if self.first_nonfinite is not None:
            second, step, layer, quantity = self.first_nonfinite
            place = {**attempt, "layer": layer, "quantity": str(quantity)}
            rows.append((metrics.FIRST_NONFINITE_INFO, place, _from(second, 1)))
            rows.append((metrics.FIRST_NONFINITE_STEP, attempt, _from(second, step)))
        if self.diagnosis is not None:
            rows.append((metrics.DIAGNOSIS, {**attempt, "shape": "spike_recovered"}, lambda now: 0))
            rows.append((metrics.DIAGNOSIS, {**attempt, "shape": self.diagnosis}, _from(NOON, 1)))
        for spec, step in (
            (metrics.LAST_HEALTHY_STEP, self.last_healthy_step),
            (metrics.LAST_CLEAN_CHECKPOINT_STEP, self.last_clean_checkpoint_step),
        ):
            if step is not None:
                rows.append((spec, {}, _from(0, step)))
        return rows

    def scraped(self, until: int) -> list[dict[str, str]]:
        """The series in promtool's notation, scraped from 0 to ``until``."""
        target = {
            "namespace": self.namespace,
            "job": "training",
            "instance": self.pod or f"{self.run_id}-{self.attempt}-{self.rank}:10420",
            "run_id": self.run_id,
            "rank": str(self.rank),
        }
        return [
            {"series": notation(spec.name, {**target, **labels}), "values": self._values(read, until)}
            for spec, labels, read in self.series()
        ]

    def _values(self, read: Reading, until: int) -> str:
        tokens, seen = [], False
        for now in range(0, until + 1, SCRAPE):
            there = self.born <= now and (self.gone is None or now < self.gone) and now not in self.blinks
            value = read(now) if there else None
            tokens.append("stale" if value is None and seen else "_" if value is None else f"{value}")
            seen = value is not None
        return " ".join(tokens)

    def _steps(self, now: int) -> int:
        end = now if self.stuck is None else min(now, self.stuck)
        return int((end - self.born) // self.step_seconds)

    def _ended(self, reason: str) -> Reading:
        return lambda now: float(self.ended is not None and now >= self.ended[0] and self.ended[1] == reason)

    def _in_phase(self, phase: str) -> Reading:
        return lambda now: float(_latest(self.phases, now, "train") == phase)


def notation(name: str, labels: Labels) -> str:
    """``name{label="value"}``; a label without a value is left out, as Prometheus does."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items() if value) + "}"


def _latest(changes: Sequence[tuple[int, Any]], now: int, default: Any) -> Any:
    return next((what for second, what in reversed(changes) if second <= now), default)


def _from(second: int, value: float) -> Reading:
    return lambda now: value if now >= second else None


def _count(times: Sequence[int]) -> Reading:
    return lambda now: sum(second <= now for second in times)


def _last(times: Sequence[int]) -> Reading:
    return lambda now: max((second for second in times if second <= now), default=None)


Fired = Mapping[str, Sequence[Labels]]
"""Labels of what fires, by alert."""


class Bench:
    """Runs stories against a rule file; every alert that is not expected must be silent."""

    def __init__(self, promtool: str, rules: str, folder: Path) -> None:
        self._promtool = promtool
        self._folder = folder
        self._rules = yaml.safe_load(rules)

    def expect(self, ranks: Sequence[Rank], fired: Mapping[int, Fired]) -> None:
        """Asserts which alerts fire at which second, by labels; texts are left aside."""
        rules = {"groups": [{**group, "rules": [_mute(rule) for rule in group["rules"]]} for group in self._groups()]}
        cases = [
            {
                "eval_time": f"{second}s",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": dict(labels)} for labels in alerts.get(alert, ())],
            }
            for second, alerts in fired.items()
            for alert in self._names()
        ]
        self._run(rules, ranks, max(fired), {"alert_rule_test": cases})

    def expect_text(self, ranks: Sequence[Rank], second: int, alert: str, labels: Labels, texts: Labels) -> None:
        """Asserts the annotations of one alert, word by word."""
        case = {
            "eval_time": f"{second}s",
            "alertname": alert,
            "exp_alerts": [{"exp_labels": dict(labels), "exp_annotations": dict(texts)}],
        }
        self._run({"groups": self._groups()}, ranks, second, {"alert_rule_test": [case]})

    def expect_value(self, ranks: Sequence[Rank], second: int, expr: str, values: Mapping[str, float]) -> None:
        """Asserts the samples of a query, by series."""
        case = {
            "eval_time": f"{second}s",
            "expr": expr,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
        }
        self._run({"groups": self._groups()}, ranks, second, {"promql_expr_test": [case]})

    def _groups(self) -> list[dict[str, list[dict[str, object]]]]:
        groups: list[dict[str, list[dict[str, object]]]] = self._rules["groups"]
        return groups

    def _names(self) -> list[str]:
        return [str(rule["alert"]) for group in self._groups() for rule in group["rules"] if "alert" in rule]

    def _run(self, rules: object, ranks: Sequence[Rank], until: int, test: Mapping[str, object]) -> None:
        (self._folder / "rules.yaml").write_text(json.dumps(rules))
        scenario = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": f"{SCRAPE}s",
            "tests": [
                {
                    "interval": f"{SCRAPE}s",
                    "input_series": [row for rank in ranks for row in rank.scraped(until)],
                    **test,
                }
            ],
        }
        (self._folder / "test.yaml").write_text(json.dumps(scenario))
        result = subprocess.run(
            [self._promtool, "test", "rules", "test.yaml"], cwd=self._folder, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr


def _mute(rule: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in rule.items() if key != "annotations"}
