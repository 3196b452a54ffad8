"""The alert rules: what the judge found, brought to people, once a run whatever its number of ranks.

Rules read the verdict, they do not judge: a scrape sees one step of many. They never compare a
magnitude, because NaN compares false, and never count on ``increase`` alone, because a counter's
first event is invisible to it when the series is born with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from gradexporter import metrics
from gradexporter.bundle import texts
from gradexporter.bundle.promql import ATTEMPT, RUN, duration, series
from gradexporter.config import AlertConfig
from gradexporter.records import FindingKind, Severity, State

DASHBOARD_UID = "gradexporter-run"

HEADER = """\
# Written by `gradexporter bundle`; do not edit. Other thresholds, routing labels or links:
#   from gradexporter import bundle, config
#   bundle.write(Path(), "rules", config.Config(alerts=config.AlertConfig(...)))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert rule: ``left`` compared with ``right``, then what keeps it quiet."""

    name: str
    severity: Severity
    left: str
    """Left side of the comparison: what has data whenever the rule can judge at all."""
    right: str
    """The operator and what ``left`` is compared with."""
    conditions: tuple[str, ...] = ()
    """``and`` and ``unless`` clauses, each on a line of its own."""
    for_seconds: int = 0
    keep_firing_seconds: int
    summary: str
    """One sentence without numbers or labels, the same for every run."""
    description: tuple[str, ...]
    """Sentences: the facts of this run: what, where, since when, what to do first."""

    @property
    def expr(self) -> str:
        """The whole expression."""
        return "\n".join((f"{self.left} {self.right}", *self.conditions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule, named ``level:metric:operation``."""

    name: str
    expr: str


def alerts(config: AlertConfig) -> tuple[Alert, ...]:
    """Every alert, the gravest first."""
    return (_nonfinite(config), _cascade(config), _died(config), _spike(config), _frequent(config), _stalled(config))


def recordings() -> tuple[Recording, ...]:
    """One series a run of what a fleet is sorted by; keep these where the ranks' own series are dropped early."""
    return (
        Recording(
            name=f"namespace_run_id_attempt:{metrics.HEALTH_STATE.name}:max",
            expr=f"max by ({ATTEMPT}) ({series(metrics.HEALTH_STATE)})",
        ),
        Recording(
            name=f"namespace_run_id:{metrics.GRADIENT_SPIKE_RATIO_PEAK.name}:max",
            expr=f"max by ({RUN}) ({series(metrics.GRADIENT_SPIKE_RATIO_PEAK)})",
        ),
        Recording(
            name=f"namespace_run_id:{metrics.STEP_SECONDS_TOTAL.base_name}:mean",
            expr=_mean_step_seconds(),
        ),
    )


def render(config: AlertConfig) -> str:
    """The rule file as YAML text."""
    return HEADER + "groups:\n" + "".join(_lines(config))


# -- the rules ------------------------------------------------------------------------------------


def _nonfinite(config: AlertConfig) -> Alert:
    return Alert(
        name="GradexporterNonfinite",
        severity=Severity.CRITICAL,
        left=_last_finding(config, FindingKind.NONFINITE),
        right=_recent(config),
        conditions=(_unless_paging_is_off(config),),
        keep_firing_seconds=config.keep_firing_seconds,
        summary="Training produces non-finite values.",
        description=(
            f"{texts.RUN} has NaN or Inf in a loss, activation, parameter or applied gradient,",
            "last at {{ $value | humanizeTimestamp }}.",
            texts.first_nonfinite(config.lookback_seconds),
            texts.shape(config.lookback_seconds),
            *texts.restart_point(config.lookback_seconds),
            "First action: stop the run, every further step is wasted.",
        ),
    )


def _cascade(config: AlertConfig) -> Alert:
    return Alert(
        name="GradexporterGradientCascade",
        severity=Severity.CRITICAL,
        left=_last_finding(config, FindingKind.GRADIENT_CASCADE, FindingKind.OVERFLOW_IMMINENT),
        right=_recent(config),
        conditions=(_unless_paging_is_off(config),),
        keep_firing_seconds=config.keep_firing_seconds,
        summary="Training is finite but breaking up: a spike has reached the parameters, or a value nears overflow.",
        description=(
            f"{texts.RUN} is in a cascade, last at {{{{ $value | humanizeTimestamp }}}};",
            "without action non-finite values usually follow within steps.",
            texts.worst_layer(config.lookback_seconds),
            texts.shape(config.lookback_seconds),
            *texts.restart_point(config.lookback_seconds),
            "First action: stop the run before it writes another checkpoint.",
        ),
    )


def _died(config: AlertConfig) -> Alert:
    ended_badly = series(metrics.RUN_ENDED, {"reason": ("exception", "signal")})
    alive = f"{series(metrics.HEALTH_STATE)} unless ignoring (attempt, reason) {ended_badly} == 1"
    last_state = f"last_over_time({series(metrics.HEALTH_STATE, window=config.lookback_seconds)})"
    closed = f"last_over_time({series(metrics.RUN_ENDED, {'reason': 'closed'}, window=config.lookback_seconds)}) == 1"
    return Alert(
        name="GradexporterDiedWhileUnhealthy",
        severity=Severity.CRITICAL,
        left=f"max by ({ATTEMPT}) ({last_state})",
        right=f">= {State.SPIKE.code}",
        conditions=(
            f"unless on ({ATTEMPT}) ({alive})",
            f"unless on ({ATTEMPT}) ({last_state} and ignoring (attempt, reason) {closed})",
            _unless_paging_is_off(config),
        ),
        for_seconds=config.died_for_seconds,
        keep_firing_seconds=config.keep_firing_seconds,
        summary="A run ended without being closed while its gradients were unhealthy.",
        description=(
            f"{texts.RUN} is gone; its last state was {texts.STATE}, and it did not close normally.",
            texts.worst_layer(config.lookback_seconds),
            texts.shape(config.lookback_seconds),
            *texts.restart_point(config.lookback_seconds),
            "First action: read the last lines of its log before it is restarted.",
        ),
    )


def _spike(config: AlertConfig) -> Alert:
    return Alert(
        name="GradexporterGradientSpike",
        severity=Severity.WARNING,
        left=_last_finding(config, FindingKind.GRADIENT_SPIKE),
        right=_recent(config),
        keep_firing_seconds=config.keep_firing_seconds,
        summary="The gradient norm spiked above its baseline.",
        description=(
            f"{texts.RUN} had a gradient spike, last at {{{{ $value | humanizeTimestamp }}}};",
            "most spikes recover by themselves.",
            texts.worst_layer(config.lookback_seconds),
            "First action: none if the state is healthy again; else watch the dashboard.",
        ),
    )


def _frequent(config: AlertConfig) -> Alert:
    window = config.spikes_window_seconds
    spikes = f"increase({series(metrics.FINDINGS_TOTAL, {'finding': FindingKind.GRADIENT_SPIKE}, window=window)})"
    steps = f"increase({series(metrics.STEPS_TOTAL, window=window)})"
    per_step = f"sum without (finding) ({spikes}) / ignoring (attempt) group_left () sum without (outcome) ({steps})"
    return Alert(
        name="GradexporterGradientSpikesFrequent",
        severity=Severity.WARNING,
        left=f"max by ({ATTEMPT}) ({per_step})",
        right=f"> {config.spikes_per_step}",
        conditions=(f"and on ({ATTEMPT}) max by ({ATTEMPT}) ({spikes}) > {config.spikes_at_least}",),
        keep_firing_seconds=config.keep_firing_seconds,
        summary="The gradient norm spikes more often than healthy training does.",
        description=(
            f"{texts.RUN} had a gradient spike in {{{{ $value | humanizePercentage }}}} of the steps of the last",
            f"{duration(window)}.",
            texts.worst_layer(config.lookback_seconds),
            "First action: lower the learning rate or tighten clipping before a spike turns into a cascade.",
        ),
    )


def _stalled(config: AlertConfig) -> Alert:
    attempts = f"ignoring (attempt) group_right () {series(metrics.HEALTH_STATE)} * 0"
    age = f"time() - max by ({ATTEMPT}) ({series(metrics.LAST_STEP_TIMESTAMP)} + {attempts})"
    patience = f"{config.stalled_step_times:g} * {_mean_step_seconds()}"
    paused = series(metrics.RUN_PHASE, {"phase": ("eval", "checkpoint")}, window=config.stalled_seconds)
    return Alert(
        name="GradexporterTrainingStalled",
        severity=Severity.WARNING,
        left=age,
        right=f"> {config.stalled_seconds}",
        conditions=(
            f"unless on ({ATTEMPT}) {age} <= on ({RUN}) group_left () {patience}",
            f"unless on ({RUN}) max_over_time({paused}) == 1",
            f"unless on ({RUN}) {series(metrics.RUN_ENDED)} == 1",
        ),
        keep_firing_seconds=config.keep_firing_seconds,
        summary="Training has stopped making steps although the process is alive.",
        description=(
            f"{texts.RUN} closed its last step {{{{ $value | humanizeDuration }}}} ago,",
            "is in no evaluation or checkpoint phase and has not ended.",
            texts.last_step(),
            "First action: dump the stacks of its ranks (py-spy dump) and look for the one that waits alone.",
        ),
    )


# -- parts of expressions -------------------------------------------------------------------------


def _last_finding(config: AlertConfig, *kinds: FindingKind) -> str:
    words = tuple(str(kind) for kind in kinds)
    finding = words if len(words) > 1 else words[0]
    window = series(metrics.LAST_FINDING_TIMESTAMP, {"finding": finding}, window=config.lookback_seconds)
    return f"max by ({ATTEMPT}) (max_over_time({window}))"


def _recent(config: AlertConfig) -> str:
    return f"> time() - {config.lookback_seconds}"


def _unless_paging_is_off(config: AlertConfig) -> str:
    """Looks back as far as the event does, so that the switch outlives its target exactly as long."""
    off = series(metrics.RUN_INFO, {"paging": "off"}, window=config.lookback_seconds)
    return f"unless on ({RUN}) max_over_time({off})"


def _mean_step_seconds() -> str:
    """Since the process started: a mean over a window has no steps in it while a run is stalled."""
    steps = f"sum without (outcome) ({series(metrics.STEPS_TOTAL)})"
    return f"max by ({RUN}) ({series(metrics.STEP_SECONDS_TOTAL)} / {steps})"


# -- YAML -----------------------------------------------------------------------------------------


def _lines(config: AlertConfig) -> Iterator[str]:
    window = config.lookback_seconds
    yield "  - name: gradexporter-alerts\n    rules:\n"
    for alert in alerts(config):
        yield f"      - alert: {alert.name}\n"
        yield _block("expr", alert.expr)
        yield f"        for: {duration(alert.for_seconds)}\n"
        yield f"        keep_firing_for: {duration(alert.keep_firing_seconds)}\n"
        yield "        labels:\n"
        yield f"          severity: {alert.severity}\n"
        for label in config.routing_labels:
            yield f"          {label}: '{texts.routing_label(label, window)}'\n"
        yield "        annotations:\n"
        yield from _annotations(config, alert)
    yield "  - name: gradexporter-runs\n    rules:\n"
    for recording in recordings():
        yield f"      - record: {recording.name}\n"
        yield _block("expr", recording.expr)


def _annotations(config: AlertConfig, alert: Alert) -> Iterator[str]:
    runbook = f"{config.runbook_url.rstrip('/')}/{alert.name}.md"
    variables = "var-namespace={{ $labels.namespace | urlquery }}&var-run={{ $labels.run_id | urlquery }}"
    dashboard = f"{config.grafana_url.rstrip('/')}/d/{DASHBOARD_UID}?{variables}"
    yield f"          summary: {json.dumps(alert.summary)}\n"
    yield "          description: >-\n"
    yield from (f"            {sentence}\n" for sentence in alert.description)
    yield f"          runbook_url: {json.dumps(runbook)}\n"
    yield f"          dashboard_url: {json.dumps(dashboard)}\n"


def _block(name: str, text: str) -> str:
    return f"        {name}: |-\n" + "".join(f"          {line}\n" for line in text.splitlines())
