"""The dashboard of one run: what each panel asks and says. How a panel is drawn is ``panels``."""

from __future__ import annotations

from typing import Any

from gradexporter import metrics
from gradexporter.bundle import panels, queries
from gradexporter.bundle.panels import Query, Word
from gradexporter.bundle.queries import NOTHING, increase, now, or_nothing, or_one, over_range, rate, worst_layers
from gradexporter.bundle.rules import DASHBOARD_UID
from gradexporter.config import Config
from gradexporter.records import State

WORST = 10
"""Layers that a panel shows: those that were worst at any time in the range."""

STATES = tuple(
    Word(value=state.code, text=str(state).replace("_", " "), color=color)
    for state, color in zip(State, (panels.BLUE, panels.GREEN, panels.YELLOW, panels.ORANGE, panels.RED), strict=True)
)


def render(config: Config) -> dict[str, str]:
    """Text of every dashboard, by file name."""
    return {f"{DASHBOARD_UID}.json": _run(config)}


def _run(config: Config) -> str:
    spike = 10**config.judge.spike_decades
    return panels.encode(
        uid=DASHBOARD_UID,
        title="gradexporter / Run",
        description="One training run: its verdict, what led to it, and in which layer.",
        variables=_variables(),
        annotations=[("Alerts", queries.ALERTS, "{{alertname}}", "{{severity}}, attempt {{attempt}}")],
        sections=[
            ("Verdict", _verdict()),
            ("Gradient and loss", _gradient_and_loss(spike)),
            ("Events", _events()),
            ("Layers", _layers(spike)),
            ("Optimizer and precision", _optimizer()),
            ("Exporter", _exporter()),
        ],
    )


def _variables() -> list[Any]:
    return [
        panels.datasource_variable(),
        panels.variable(
            "namespace",
            "Namespace",
            "Namespace of the training pods; All outside Kubernetes.",
            queries.NAMESPACES,
            '/namespace="([^"]+)"/',
            sort=panels.BY_NAME,
            many=True,
        ),
        panels.variable(
            "run",
            "Run",
            "Every run in the time range, ended ones too; the one that stepped last comes first.",
            queries.RUNS,
            '/run_id="([^"]+)"/',
            sort=panels.AS_QUERIED,
            many=False,
        ),
        panels.variable(
            "rank",
            "Rank",
            "Ranks of the run.",
            queries.RANKS,
            '/rank="([^"]+)"/',
            sort=panels.BY_NUMBER,
            many=True,
        ),
    ]


# -- sections -------------------------------------------------------------------------------------


def _verdict() -> list[Any]:
    step_seconds = f"{rate(metrics.STEP_SECONDS_TOTAL)} / {queries.steps_per_second()}"
    return [
        panels.states(
            "Health of each rank",
            "State after each scrape. Finite is not healthy: a cascade comes before the non-finite value.",
            [Query(f"max by (rank, attempt) ({now(metrics.HEALTH_STATE)})", "rank {{rank}}, attempt {{attempt}}")],
            STATES,
        ),
        panels.number("Step", metrics.STEP.help, Query(f"max({now(metrics.STEP)})"), unit="locale"),
        panels.number(
            "Step time", "Mean seconds a step, on the slowest rank.", Query(f"max({step_seconds})"), unit="s"
        ),
        panels.number(
            "Last healthy step",
            "Last step that every rank found healthy.",
            Query(or_nothing("min", metrics.LAST_HEALTHY_STEP)),
            unit="locale",
            words=[Word(value=NOTHING, text="none yet", color=panels.GREY)],
        ),
        panels.number(
            "Last clean checkpoint",
            "Newest reported checkpoint that is no later than the last healthy step: restart from here.",
            Query(or_nothing("min", metrics.LAST_CLEAN_CHECKPOINT_STEP)),
            unit="locale",
            words=[Word(value=NOTHING, text="none reported", color=panels.GREY)],
        ),
        panels.number(
            "First non-finite step",
            "Step of the run's first NaN or Inf, on the rank that had it first.",
            Query(or_nothing("min", metrics.FIRST_NONFINITE_STEP)),
            unit="locale",
            words=[Word(value=NOTHING, text="none so far", color=panels.GREY)],
        ),
        panels.number(
            "Steps to overflow",
            "Steps to overflow if growth keeps accelerating; judged in state spike and cascade only.",
            Query(or_nothing("min", metrics.STEPS_TO_OVERFLOW)),
            unit="locale",
            words=[Word(value=NOTHING, text="not growing", color=panels.GREY)],
        ),
        panels.rows(
            "First non-finite value",
            "Where each rank saw its first NaN or Inf; the earliest step is where it began. Empty: none so far.",
            Query(queries.first_nonfinite(), instant=True),
            [("Value", "step"), ("rank", "rank"), ("layer", "layer"), ("quantity", "quantity"), ("attempt", "attempt")],
        ),
        panels.states(
            "Diagnosis",
            "The failure shape that the findings amount to; the runbooks say what to do about each.",
            [Query(f"max by (shape) ({now(metrics.DIAGNOSIS)})", "{{shape}}")],
            [Word(value=0, text="no", color="transparent"), Word(value=1, text="diagnosed", color=panels.ORANGE)],
            width=12,
        ),
    ]


def _gradient_and_loss(spike: float) -> list[Any]:
    return [
        panels.lines(
            "Gradient norm",
            "L2 norm before clipping, across the selected ranks. A gap is a value that is not finite: see Events.",
            [
                Query(f"max({now(metrics.GRADIENT_NORM_PEAK)})", "peak of 30 to 60 s"),
                Query(f"max({now(metrics.GRADIENT_NORM)})", "largest rank"),
                Query(f"min({now(metrics.GRADIENT_NORM)})", "smallest rank"),
                Query(f"max({now(metrics.GRADIENT_NORM_BASELINE)})", "baseline"),
            ],
            unit="sci",
            log=True,
        ),
        panels.lines(
            "Loss",
            "Mean loss of the last step, across the selected ranks. A gap is a value that is not finite or below zero.",
            [
                Query(f"max({now(metrics.LOSS_VALUE)})", "largest rank"),
                Query(f"min({now(metrics.LOSS_VALUE)})", "smallest rank"),
            ],
            log=True,
        ),
        panels.lines(
            "Spike ratio",
            f"Gradient norm over its baseline, on the worst rank; above {spike:g} is a spike.",
            [
                Query(f"max({now(metrics.GRADIENT_SPIKE_RATIO_PEAK)})", "peak of 30 to 60 s"),
                Query(f"max({now(metrics.GRADIENT_SPIKE_RATIO)})", "last step"),
            ],
            log=True,
            threshold=spike,
        ),
        panels.buckets(
            "Gradient norm of every step",
            "Steps by decade of their gradient norm, counted in process: nothing falls between two scrapes.",
            Query(f"sum by (le) ({increase(metrics.STEP_GRADIENT_NORM, part='bucket')})", "{{le}}"),
        ),
    ]


def _events() -> list[Any]:
    steps = queries.steps_per_second()
    return [
        panels.lines(
            "Findings",
            "Steps with a finding, by kind, on the rank that had most. Counted at every step, not at every scrape.",
            [Query(f"max by (finding) ({increase(metrics.FINDINGS_TOTAL)})", "{{finding}}")],
            bars=True,
        ),
        panels.lines(
            "Non-finite steps",
            "Steps with a non-finite value, by quantity, on the rank that had most. Skipped updates do not count.",
            [Query(f"max by (quantity) ({increase(metrics.NONFINITE_STEPS_TOTAL)})", "{{quantity}}")],
            bars=True,
        ),
        panels.lines(
            "Skipped and clipped steps",
            "Share of steps that a loss scaler skipped, and whose gradient clipping made smaller.",
            [
                Query(f"max({queries.skipped_per_second()} / {steps})", "skipped"),
                Query(f"max({rate(metrics.CLIPPED_STEPS_TOTAL)} / {steps})", "clipped"),
            ],
            unit="percentunit",
        ),
        panels.states(
            "Phase and end",
            "What the run is doing, and how it ended; a stall is only judged while it trains.",
            [
                Query(f"max by (phase) ({now(metrics.RUN_PHASE)})", "{{phase}}"),
                Query(f"max by (reason) ({now(metrics.RUN_ENDED)})", "ended: {{reason}}"),
            ],
            [Word(value=0, text="no", color="transparent"), Word(value=1, text="yes", color=panels.BLUE)],
            width=12,
        ),
    ]


def _layers(spike: float) -> list[Any]:
    ratio = f"max by (layer) ({over_range('max_over_time', metrics.LAYER_SPIKE_RATIO)})"
    return [
        panels.ranking(
            "Worst layers",
            "Largest spike ratio of a layer in the time range: where the incident most likely began.",
            Query(f"sort_desc(topk({WORST}, {ratio}))", "{{layer}}", instant=True),
            threshold=spike,
        ),
        panels.lines(
            "Spike ratio of the worst layers",
            "Gradient norm of a layer over its own baseline; the layers that spiked most in the time range.",
            [Query(worst_layers(metrics.LAYER_SPIKE_RATIO, WORST), "{{layer}}")],
            log=True,
            threshold=spike,
        ),
        panels.lines(
            "Gradient norm by layer",
            "L2 norm of a layer's gradient before clipping; the largest in the time range.",
            [Query(worst_layers(metrics.LAYER_GRADIENT_NORM, WORST), "{{layer}}")],
            unit="sci",
            log=True,
        ),
        panels.lines(
            "Activation maximum by layer",
            "Largest absolute element of a layer's output; the largest in the time range.",
            [Query(worst_layers(metrics.LAYER_ACTIVATION_MAX_ABS, WORST), "{{layer}}")],
            unit="sci",
            log=True,
        ),
        panels.lines(
            "Non-finite elements by layer",
            "Non-finite elements of a layer's gradient and output; skipped updates count here.",
            [
                Query(
                    f"topk({WORST}, max by (layer) ({increase(metrics.LAYER_GRADIENT_NONFINITE)}))",
                    "{{layer}} gradient",
                ),
                Query(
                    f"topk({WORST}, max by (layer) ({increase(metrics.LAYER_ACTIVATION_NONFINITE)}))",
                    "{{layer}} activation",
                ),
            ],
            bars=True,
        ),
        panels.lines(
            "Zero activations by layer",
            "Share of a layer's output that is exactly zero; near 100 % is a dead layer.",
            [Query(worst_layers(metrics.LAYER_ACTIVATION_ZERO_RATIO, WORST), "{{layer}}")],
            unit="percentunit",
        ),
    ]


def _optimizer() -> list[Any]:
    return [
        panels.lines(
            "Largest magnitudes",
            "Largest absolute element of each kind, on the worst rank. Momentum and parameters outgrow a spike.",
            [
                Query(f"max({now(metrics.ACTIVATION_MAX_ABS)})", "activation"),
                Query(f"max({now(metrics.GRADIENT_MAX_ABS)})", "gradient"),
                Query(f"max({now(metrics.PARAMETER_MAX_ABS)})", "parameter"),
                Query(queries.moments(), "{{moment}}"),
            ],
            unit="sci",
            log=True,
        ),
        panels.lines(
            "Headroom to overflow",
            "Decades between the largest magnitude and the largest value of its dtype, on the worst rank.",
            [Query(f"min({now(metrics.OVERFLOW_HEADROOM)})", "decades")],
            threshold=1,
        ),
        panels.lines(
            "Update ratio",
            "L2 norm of the update over L2 norm of the parameters; healthy runs stay below 0.01.",
            [Query(f"max({now(metrics.UPDATE_RATIO)})", "largest rank")],
            unit="sci",
            log=True,
            threshold=0.01,
        ),
        panels.lines(
            "Learning rate",
            metrics.LEARNING_RATE.help,
            [Query(f"max by (group) ({now(metrics.LEARNING_RATE)})", "group {{group}}")],
            unit="sci",
        ),
        panels.lines(
            "Loss scale",
            "Scale that a gradient scaler multiplies the loss with; 1 where none is used. Falling for long: collapse.",
            [Query(or_one("min", metrics.LOSS_SCALE), "scale")],
            log=True,
        ),
        panels.lines(
            "Clip factor",
            "What clipping multiplied the last gradient with; 1 where it left it alone or is not used.",
            [Query(or_one("min", metrics.CLIP_FACTOR), "factor")],
            log=True,
        ),
    ]


def _exporter() -> list[Any]:
    overhead = f"{rate(metrics.OVERHEAD_SECONDS_TOTAL)} / {rate(metrics.STEP_SECONDS_TOTAL)}"
    return [
        panels.lines(
            "Overhead",
            "Time that gradexporter itself has run, over all its threads, per second of training; on the worst rank.",
            [Query(f"max({overhead})", "share of the step time")],
            unit="percentunit",
        ),
        panels.lines(
            "Faults",
            "Faults of gradexporter's own, fenced off from training, by part; steps dropped unjudged.",
            [
                Query(f"sum by (part) ({increase(metrics.FAILURES_TOTAL)})", "{{part}}"),
                Query(f"sum({increase(metrics.REPORTS_DROPPED_TOTAL)})", "steps dropped"),
            ],
            bars=True,
        ),
        panels.lines(
            "Cadence and lag",
            "Steps between two readings of a sampled signal, and closed steps that are not judged yet.",
            [
                Query(f"max by (signal) ({now(metrics.CAPTURE_EVERY_STEPS)})", "{{signal}} every"),
                Query(f"max({now(metrics.READBACK_LAG_STEPS)})", "lag"),
            ],
        ),
        panels.states(
            "Signals",
            "What can be measured on every selected rank; a missing signal is missing from the judgement too.",
            [Query(f"min by (signal) ({now(metrics.SIGNAL_AVAILABLE)})", "{{signal}}")],
            [
                Word(value=0, text="missing", color=panels.ORANGE),
                Word(value=1, text="collected", color=panels.GREEN),
            ],
            width=12,
        ),
        panels.lines(
            "Layers and series",
            "Layers watched, and layer series that the budget left out of the exposition.",
            [
                Query(f"max({now(metrics.WATCHED_LAYERS)})", "layers watched"),
                Query(f"max({increase(metrics.SERIES_DROPPED_TOTAL)})", "series newly left out"),
            ],
        ),
        panels.lines(
            "Over budget",
            "1 while sampled statistics cost more than their budget even when taken every tenth step, on any rank.",
            [Query(f"max({now(metrics.OVERHEAD_BUDGET_EXCEEDED)})", "over budget")],
        ),
    ]
