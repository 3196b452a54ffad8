"""What an alert says: templates that Prometheus fills in, with queries about the run that fired.

A query sees more than the alert's own labels, so that one alert a run can still name the rank, the
layer and the step. Each is about the first result, and has words for none.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradexporter import metrics
from gradexporter.bundle.promql import Matcher, Raw, duration, series
from gradexporter.metrics import MetricSpec
from gradexporter.records import State

RUN = (
    "Run {{ $labels.run_id }}{{ with $labels.namespace }} in namespace {{ . }}{{ end }}, attempt {{ $labels.attempt }},"
)
"""Which run, as the subject of a sentence."""

STATE = (
    f"{{{{ if ge $value {State.NONFINITE.code}.0 }}}}{State.NONFINITE}"
    f"{{{{ else if ge $value {State.CASCADE.code}.0 }}}}{State.CASCADE}{{{{ else }}}}{State.SPIKE}{{{{ end }}}}"
)
"""The state whose code is the alert's value."""


NOTEWORTHY = 3
"""Times its baseline that a layer must be to be named: less is noise, of a layer that was calm when it was scraped."""


def first_nonfinite(window: int) -> str:
    """Step, quantity, layer and rank of the earliest non-finite value of any rank."""
    info = _of_attempt(metrics.FIRST_NONFINITE_INFO, window)
    step = _of_attempt(metrics.FIRST_NONFINITE_STEP, window)
    return _about(
        f"bottomk(1, max by (rank, layer, quantity) (max_over_time({info}))"
        f" * on (rank) group_left () max by (rank) (max_over_time({step})))",
        # The loss and the input belong to no layer; their quantity stands in its place.
        'It began at step {{ value . | printf "%.0f" }} in the {{ label "quantity" . }}'
        '{{ if ne (label "layer" .) (label "quantity" .) }} of layer {{ label "layer" . }}{{ end }}'
        ' on rank {{ label "rank" . }}.',
        "Where it began is not known.",
    )


def worst_layer(window: int) -> str:
    """The layer that was furthest above its own baseline, and on which rank."""
    ratio = _of_run(metrics.LAYER_SPIKE_RATIO, window)
    return _about(
        f"topk(1, max by (rank, layer) (max_over_time({ratio})) > {NOTEWORTHY})",
        'Worst layer: {{ label "layer" . }} on rank {{ label "rank" . }},'
        ' {{ value . | printf "%.3g" }} times its usual gradient norm.',
        "No layer stood out at a scrape.",
    )


def shape(window: int) -> str:
    """The diagnosis, nothing where there is none."""
    diagnosed = _of_attempt(metrics.DIAGNOSIS, window)
    return _about(
        f"topk(1, max by (shape) (last_over_time({diagnosed})) == 1)", 'Diagnosis: {{ label "shape" . }}.', ""
    )


def restart_point(window: int) -> tuple[str, str]:
    """The last step that every rank found healthy, and the checkpoint to restart from."""
    return (
        _about(
            f"min(last_over_time({_of_run(metrics.LAST_HEALTHY_STEP, window)}))",
            'Last healthy step: {{ value . | printf "%.0f" }}.',
            "No healthy step is known.",
        ),
        _about(
            f"min(last_over_time({_of_run(metrics.LAST_CLEAN_CHECKPOINT_STEP, window)}))",
            'Last clean checkpoint: step {{ value . | printf "%.0f" }}.',
            "No clean checkpoint was reported.",
        ),
    )


def last_step() -> str:
    """The step that the run got to."""
    return _about(f"max({_of_run(metrics.STEP, None)})", 'Last step: {{ value . | printf "%.0f" }}.', "")


def routing_label(label: str, window: int) -> str:
    """The label's value on the run's run_info, the commonest if its ranks disagree.

    A query in the label, not a join in the expression: a join would lose the alert where run_info is
    missing, and fail the rule of every run where two ranks of one disagree.
    """
    info = f'{metrics.RUN_INFO.name}{{namespace=%q, run_id=%q, attempt=%q, {label}!=""}}[{duration(window)}]'
    return _about(f"topk(1, count by ({label}) (max_over_time({info})))", f'{{{{ label "{label}" . }}}}', "")


_RUN_MATCHERS: Mapping[str, Matcher] = {"namespace": Raw("%q"), "run_id": Raw("%q")}
_ATTEMPT_MATCHERS: Mapping[str, Matcher] = {**_RUN_MATCHERS, "attempt": Raw("%q")}


def _of_run(spec: MetricSpec, window: int | None) -> str:
    return series(spec, _RUN_MATCHERS, window=window)


def _of_attempt(spec: MetricSpec, window: int) -> str:
    return series(spec, _ATTEMPT_MATCHERS, window=window)


def _about(query: str, found: str, none: str) -> str:
    """``found`` with the first result of the query as its dot, else ``none``; each ``=%q`` is a label of the alert."""
    labels = [f"$labels.{part.rpartition(' ')[2].rpartition('{')[2]}" for part in query.split("=%q")[:-1]]
    call = f"printf `{query}` {' '.join(labels)} | query"
    other = f"{{{{ else }}}}{none}" if none else ""
    return f"{{{{ with {call} }}}}{{{{ with . | first }}}}{found}{{{{ end }}}}{other}{{{{ end }}}}"
