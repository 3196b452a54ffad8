"""Every setting once: its unit, its reason, its default, and the one reader of the environment.

An explicit argument wins over ``GRADEXPORTER_*``, which wins over the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_PORT = 10420
"""Clear of the 9100-9999 exporter list, the kubelet's 10250-10259 and torchrun's 29400-29500."""

ENV_PREFIX = "GRADEXPORTER_"

_log = logging.getLogger("gradexporter")


class GradexporterError(Exception):
    """Base of every error that gradexporter raises for its user."""


class ConfigError(GradexporterError, ValueError):
    """A setting cannot be used; the text says what, what was given, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """When a step is odd. Decades are log10 units: 1.0 is a factor of ten."""

    warmup_steps: int = 10
    """Steps before a baseline is trusted. A median is kept over them, so ten suffice; raise it for runs whose
    first steps are wild."""
    warmup_readings: int = 2
    """Readings that a baseline needs besides, for series that are sampled every few steps."""
    warmup_jump_decades: float = 1.5
    """Decades above the median so far at which a reading is odd even in warm-up, and not learned."""
    tau_steps: float = 64.0
    """Memory of a baseline in steps; 32 to 128 make no difference on recorded runs."""
    gap_limit_steps: int = 16
    """Steps that one reading may stand for, so that a single one after a long gap is no baseline."""
    cap_decades: float = 1.0
    """Decades above the baseline that a reading is learned as at most; keeps a spike from lifting it."""
    floor_decades: float = 0.7
    """Decades below its highest level that a baseline may sink: in the interpolation regime norms jump
    from next to nothing without harm. Raise it to see spikes there."""
    steady_floor_decades: float = 0.3
    """The same for series that hardly move: parameters, inputs and targets."""
    floor_decay_decades: float = 5e-5
    """Decades a step by which the highest level is forgotten: one decade in 20,000 steps."""
    spike_decades: float = 1.0
    """Decades above its baseline at which the gradient norm is a spike; 1.3 is quieter and 3 steps later."""
    cascade_parameter_decades: float = 0.5
    """Decades above its baseline at which the largest parameter turns a spike into a cascade."""
    cascade_within_steps: int = 16
    """Steps since the latest spike within which parameters are held against it."""
    cascade_gradient_decades: float = 2.0
    """Without parameter readings: decades of the gradient norm that, on two of three steps, are a cascade."""
    overflow_decades: float = 1.0
    """Decades below the largest finite value of a dtype at which overflow is near."""
    overflow_rise_decades: float = 0.2
    """Decades above its own baseline that a value so near must be, unless it is within a factor of two: a model
    whose activations were always large is no news."""
    runaway_parameter_decades: float = 1.5
    """Decades above its baseline at which a largest parameter that keeps growing is a cascade by itself: a
    saturated gradient shows no spike."""
    runaway_steps: int = 16
    """Steps that the largest parameter must have grown without pause for that."""
    growth_decades: float = 0.3
    """Decades above its baseline of the smoothed gradient norm at which, twice running and with a loss that
    rises as well, it is growing."""
    growth_warning_decades: float = 0.477
    """Decades at which growth is a warning and no longer a note: three times the baseline."""
    growth_loss_decades: float = 0.04
    """Decades that the smoothed loss must be up besides (a tenth): norms rise in healthy runs too."""
    growth_tau_steps: float = 8.0
    """Memory of that smoothing in steps; far below ``tau_steps``, so that the two can be held against each other."""
    activation_growth_decades: float = 1.0
    """Decades above its baseline of the largest activation that, on two readings running, are growth."""
    jump_decades: float = 1.0
    """Decades above its baseline at which momentum, second moment or update may have jumped ..."""
    jump_rise_decades: float = 0.5
    """... if it also rose by this much since the reading before; a slow rise is growth."""
    loss_spike_decades: float = 1.5
    """Decades above its baseline at which one loss is a spike by itself: thirty times. Below that an outlier whose
    gradient stays calm harms nothing."""
    loss_rise_decades: float = 0.5
    """Decades above its baseline that are a spike if the loss stays there."""
    loss_rise_steps: int = 5
    """Steps running that it must stay there."""
    input_decades: float = 0.5
    """Decades above their usual range at which inputs or targets are out of range: three times."""
    learning_rate_jump_decades: float = 0.477
    """Decades up or down from one step to the next at which a learning rate jumped: three times."""
    skips_in_a_row: int = 8
    """Skipped updates without one applied between them that are a collapse of the loss scale."""
    skips_at_start: int = 24
    """The same before the first applied update, while the scaler looks for its scale: from 2**24 down to 1."""
    scale_fall_decades: float = 2.0
    """Decades that a loss scale must fall below its usual for a collapse, whatever is applied in between."""
    stalled_steps: int = 20
    """Steps over which updates must change nothing to count as stalled."""
    stalled_update_ratio: float = 1e-9
    """Share of the weights' norm below which an update changes nothing in single precision."""
    stalled_rate_share: float = 0.01
    """Share of the largest learning rate so far below which small updates are the schedule's doing."""
    stalled_loss_share: float = 0.1
    """Share of the first losses below which a run has converged and may stand still."""
    stalled_cut_decades: float = 3.0
    """Decades by which no schedule cuts a learning rate in one step; a restart with the wrong one does."""
    dead_steps: int = 10
    """Steps running with a gradient of exactly zero after which a layer is dead."""
    dead_branch_steps: int = 100
    """The same for a layer that others get around, such as an expert that no token was sent to for a while."""
    vanishing_decades: float = 4.0
    """Decades of the first layer's gradient norm below the largest layer's at which it vanishes; healthy models
    keep within three."""
    vanishing_blind_decades: float = 6.0
    """The same where no loss tells whether there is progress."""
    vanishing_steps: int = 20
    """Steps running for that; few, since it shows from the first step on."""
    no_progress_share: float = 0.75
    """Share of the first losses above which there is no progress."""
    oscillation_steps: int = 64
    """Steps that a loss must swing without falling; shorter swings end by themselves."""
    oscillation_update_ratio: float = 0.01
    """Smoothed share of the weights' norm above which updates are large; healthy runs stay below 0.008."""
    oscillation_loss_share: float = 0.5
    """Share of the first losses above which a loss that swings leads nowhere."""
    oscillation_falling_share: float = 0.9
    """Share of the loss at which it began to swing below which it gets somewhere all the same."""
    oscillation_swing_decades: float = 0.05
    """Smoothed decades by which the loss swings from step to step: an eighth, up or down."""
    oscillation_tau_steps: float = 16.0
    """Memory of the smoothing of updates in steps."""
    clean_steps: int = 16
    """Steps without anything odd after which a run is healthy again."""
    repeat_steps: int = 100
    """Steps after which a finding about a lasting condition is repeated."""
    forget_steps: int = 1000
    """Healthy steps after which a diagnosis is cleared."""
    excursion_far_decades: float = 1.477
    """Decades above its baseline, thirty times, at which a value counts towards an explosion ..."""
    exploding_steps: int = 16
    """... which this many such steps in a row are, however it began."""
    excursion_pause_steps: int = 8
    """Steps without anything odd that an excursion may pause."""
    bad_batch_decades: float = 1.2
    """Decades above their usual range, sixteen times, from where inputs or targets are blamed for what follows; a
    milder batch sets off only what was about to happen."""
    bad_batch_within_steps: int = 2
    """Steps between such a batch and the first odd value."""
    nan_from_start_steps: int = 2
    """Steps by which a run that is not finite was so from its start."""
    past_peak_decades: float = 1.0
    """Decades below its peak at which an excursion subsides and is no explosion."""
    exploding_drift_decades: float = 1.0
    """Decades that a baseline must have risen before an excursion for it to be the end of a slow explosion."""
    drift_forget_decades: float = 5e-4
    """Decades a step by which the low that drift is counted from is forgotten: one decade in 2,000 steps."""
    near_limit_decades: float = 2.0
    """Decades below a dtype's maximum from where a value may have overflowed in one step, without a trace."""
    resume_steps: int = 8
    """Steps after a continued run's first within which something odd is the restart's doing."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            name, value, default = f"judge.{setting.name}", getattr(self, setting.name), setting.default
            number = (int,) if isinstance(default, int) else (int, float)
            legal = isinstance(value, number) and not isinstance(value, bool)
            if setting.name.endswith("_steps") or number == (int,):
                words = "a whole number of 1 or more" if number == (int,) else "a number of 1 or more"
                _check(legal and 1 <= value < math.inf, name, value, f"give {words}; {default} is the default")
            else:
                _check(legal and 0 < value < math.inf, name, value, f"give a number above 0; {default} is the default")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig:
    """Thresholds, windows and links of the alert rules that ``gradexporter bundle`` writes."""

    lookback_seconds: int = 600
    """How long an event keeps its alert alive, and how far back a run that is gone is still looked at.

    Covers missed scrapes and a job that died right after the event; raise it if scrapes are minutes apart, or
    the clocks of trainers and Prometheus are.
    """
    keep_firing_seconds: int = 120
    """How long an alert outlives its condition, so that a lost scrape does not open an incident twice."""
    died_for_seconds: int = 60
    """How long an unhealthy run must be gone before it counts as dead; at least two scrapes."""
    spikes_window_seconds: int = 1800
    """Window in which frequent spikes are counted; raise it for steps of a minute or more."""
    spikes_per_step: float = 1e-3
    """Share of steps with a spike above which spikes are frequent; healthy runs stay at 3 to 4 in 10,000."""
    spikes_at_least: int = 5
    """Spikes in the window that one hard batch may cause; only more than these are frequent, however few the steps."""
    stalled_seconds: int = 600
    """Least age of the last step of a stalled run; raise it if a checkpoint blocks longer and its phase is not set."""
    stalled_step_times: float = 20.0
    """Age of the last step of a stalled run in its own mean step times; what waits longer is the larger of the two."""
    routing_labels: tuple[str, ...] = ("team", "owner", "project")
    """Labels of run_info that every alert carries where the run has them; name your own of ``watch(labels=)`` here."""
    runbook_url: str = "https://github.com/gradexporter/gradexporter/blob/main/alerts/runbooks"
    """Folder of the runbooks as a browser finds it; change it if on-call reads a mirror."""
    grafana_url: str = ""
    """Address of Grafana in front of ``/d/...``; empty leaves a path that Grafana itself can follow."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            name, value = f"alerts.{setting.name}", getattr(self, setting.name)
            if isinstance(setting.default, int):
                whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
                _check(whole, name, value, f"give a whole number above 0; {setting.default} is the default")
            elif isinstance(setting.default, float):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                advice = f"give a number above 0; {setting.default:g} is the default"
                _check(number and 0 < value < math.inf, name, value, advice)
            elif isinstance(setting.default, str):
                plain = isinstance(value, str) and re.fullmatch(r"[!-~]*", value) and not set(value) & set("\"'\\{}")
                _check(bool(plain), name, value, "give an address, without quotes, braces or spaces")
        listed = isinstance(self.routing_labels, tuple)
        _check(listed, "alerts.routing_labels", self.routing_labels, "give a tuple of label names")
        _check(self.spikes_per_step < 1, "alerts.spikes_per_step", self.spikes_per_step, "give a share, such as 0.001")
        for label in self.routing_labels:
            _check_label("alerts.routing_labels", label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one watched run."""

    disabled: bool = False
    """``watch()`` returns an inert Monitor: no hook, no thread, no port."""
    serve: bool = True
    """Open the HTTP endpoint."""
    host: str = "0.0.0.0"
    """Address that the endpoint binds."""
    port: int | None = None
    """TCP port; None is 10420 plus the local rank. A taken port moves on to the next free one."""
    run_id: str | None = None
    """Identifies the run on every series; None is derived from the job (``Identity``)."""
    attempt: str | None = None
    """Which try of the run this is; None is the restart count of torchrun or Slurm, else 0."""
    paging: bool = True
    """False for an experiment: shows on run_info, and no critical rule pages for the run."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Routing labels for run_info, such as ``{"team": "vision"}``; alerts carry them."""
    start_step: int = 1
    """Number of the first step, 1 or more; a resumed run passes the last finished step plus one."""
    activations: str = "layers"
    """``layers``: outputs of modules that own parameters; ``all``: parameterless leaves too."""
    activation_every: int | None = None
    """Steps between activation rms, maximum and zero ratio; None lets the budget decide (1, 2, 5 or 10)."""
    state_every: int | None = None
    """Steps between parameter, update and optimizer state statistics; None lets the budget decide."""
    kernels: str = "auto"
    """``stock``: torch operations; ``native``: kernels compiled on this machine, and Triton's on CUDA; ``auto``: those
    compiled on this machine where it has a C compiler. The first watch compiles them once, beside training."""
    overhead_budget: float = 0.02
    """Share of the step time that sampled statistics may take, beyond what runs at every step."""
    max_series: int = 2000
    """Series per rank; layers beyond it are grouped by block and the worst stay named."""
    aligned_every: int = 100
    """Steps between two values of the aligned series, which ranks compare and add: they are scraped at different
    moments, and at this distance most moments see the same step on all. At least three scrape intervals' worth of
    steps; the same on all ranks."""
    all_reduce: bool = False
    """One small sum over the ranks of a sharded model each step, on the worker threads: every rank then publishes the
    norms of the model, by layer too. Every rank of the process group calls ``watch`` with it."""
    layer_shares: bool = False
    """Ranks that hold a share of the model name its layers, healthy or not. Off, only global rank 0 does: a
    thousand ranks with three hundred layers are a million series."""
    hold_seconds: float | None = None
    """How long ``close()`` and exit keep serving the final state, so that a last scrape can see it. None: only
    when the run ends unhealthy while it is scraped, for two scrape intervals and at most 30 s."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """When a step is odd."""
    alerts: AlertConfig = field(default_factory=AlertConfig)
    """Thresholds of the alert rules that ``gradexporter bundle`` writes."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            _check_type(setting.name, getattr(self, setting.name))
        if self.port is not None:
            _check(0 <= self.port <= 65535, "port", self.port, "give 1 to 65535, or 0 for any free port")
        _check(bool(self.host), "host", self.host, "give an address such as 127.0.0.1, or 0.0.0.0 for all")
        _check(self.activations in ("layers", "all"), "activations", self.activations, "give 'layers' or 'all'")
        _check(self.kernels in ("auto", "stock", "native"), "kernels", self.kernels, "give 'auto', 'stock' or 'native'")
        for name in ("run_id", "attempt"):
            _check(getattr(self, name) != "", name, "", "give a name, or None to take it from the launcher")
        advice = "steps count from 1; give 1 for a new run, the last finished step plus one for a resumed one"
        _check(self.start_step >= 1, "start_step", self.start_step, advice)
        advice = "give a whole number of steps; 100 is the default"
        _check(self.aligned_every >= 1, "aligned_every", self.aligned_every, advice)
        for name in ("activation_every", "state_every"):
            every = getattr(self, name)
            _check(every is None or every >= 1, name, every, "give 1 for every step, or None to let the budget decide")
        _check(
            0 < self.overhead_budget <= 1,
            "overhead_budget",
            self.overhead_budget,
            "give a share of the step time, such as 0.02",
        )
        _check(
            self.max_series >= 200,
            "max_series",
            self.max_series,
            "give 200 or more; the run-level series alone need about 150",
        )
        if self.hold_seconds is not None:
            _check(0 <= self.hold_seconds < math.inf, "hold_seconds", self.hold_seconds, "give seconds, 0 for none")
        for label, value in self.labels.items():
            _check_label("labels", label)
            _check(isinstance(value, str), f"labels[{label!r}]", value, "label values are strings")


RESERVED_LABELS = frozenset(
    [
        "job",
        "instance",
        "namespace",
        "pod",
        "container",
        "cluster",
        "run_id",
        "rank",
        "local_rank",
        "world_size",
        "attempt",
        "paging",
        "model",
        "norms",
        "optimizer",
        "layer",
        "quantity",
        "finding",
        "severity",
        "alertname",
        "le",
    ]
)
"""Names that a routing label may not take: target labels are Prometheus' own, the rest are ours."""


def resolve(settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """The settings of a run: ``settings`` over ``GRADEXPORTER_*`` over the defaults.

    Raises ConfigError for an unknown name and for a value of either source that cannot be used.
    """
    known = {setting.name for setting in dataclasses.fields(Config)}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    return Config(**{**_from_env(os.environ if environ is None else environ), **settings})


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    readers = {ENV_PREFIX + name.upper(): (name, read) for name, (_, _, read) in _SCALARS.items() if read is not None}
    suffixes = [variable.removeprefix(ENV_PREFIX) for variable in readers]  # with the prefix all names are alike
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in readers:
            name, read = readers[variable]
            try:
                found[name] = read(text)
            except ValueError as error:
                raise ConfigError(f"{variable}={text!r} cannot be used: {error}") from None
            try:
                Config(**{name: found[name]})
            except ConfigError as error:
                raise ConfigError(f"{variable}={text!r} cannot be used: {error}") from None
        elif (name := variable[len(ENV_PREFIX) :].lower()) in _SCALARS:
            _log.warning("gradexporter: %s is not read: pass %s= to watch() instead", variable, name)
        elif near := difflib.get_close_matches(variable.removeprefix(ENV_PREFIX), suffixes, n=1, cutoff=0.75):
            meant = ENV_PREFIX + near[0]
            _log.warning(
                "gradexporter: the environment sets %s, which nothing reads; did you mean %s?", variable, meant
            )
    return found


def _read_name(text: str) -> str | None:
    return text.strip() or None  # an empty variable is how templates leave one unset


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("give 1 or 0")


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("give a whole number") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number") from None


def _read_labels(text: str) -> dict[str, str]:
    labels = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        label, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"{part!r} is no pair; give name=value,name=value")
        labels[label.strip()] = value.strip()
    return labels


_SCALARS: dict[str, tuple[type | tuple[type, ...], str, Callable[[str], Any] | None]] = {
    "disabled": (bool, "True or False", _read_bool),
    "serve": (bool, "True or False", _read_bool),
    "host": (str, "an address", str),
    "port": ((int, type(None)), "a port number", _read_int),
    "run_id": ((str, type(None)), "a string such as 'bert-7'", _read_name),
    "attempt": ((str, type(None)), "a string such as '1'", _read_name),
    "paging": (bool, "True or False", _read_bool),
    "labels": (Mapping, "a mapping of strings", _read_labels),
    "start_step": (int, "a whole number", _read_int),
    "activations": (str, "'layers' or 'all'", str),
    "activation_every": ((int, type(None)), "a whole number of steps", _read_int),
    "state_every": ((int, type(None)), "a whole number of steps", _read_int),
    "kernels": (str, "'auto', 'stock' or 'native'", str),
    "overhead_budget": ((int, float), "a share such as 0.02", _read_float),
    "max_series": (int, "a whole number", _read_int),
    "aligned_every": (int, "a whole number of steps", _read_int),
    "all_reduce": (bool, "True or False", _read_bool),
    "layer_shares": (bool, "True or False", _read_bool),
    "hold_seconds": ((int, float, type(None)), "seconds", _read_float),
    "judge": (JudgeConfig, "a JudgeConfig", None),
    "alerts": (AlertConfig, "an AlertConfig", None),
}
"""Type, the words for it, and how its environment variable is read, by setting."""


def _check_type(name: str, value: Any) -> None:
    expected, words, _ = _SCALARS[name]
    wrong_bool = isinstance(value, bool) and expected is not bool
    _check(isinstance(value, expected) and not wrong_bool, name, value, f"give {words}")


def _check(holds: bool, name: str, got: Any, advice: str) -> None:
    if not holds:
        raise ConfigError(f"{name} cannot be {got!r}: {advice}")


def _check_label(name: str, label: Any) -> None:
    legal = isinstance(label, str) and re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label) and not label.startswith("__")
    _check(bool(legal), name, label, "label names are letters, digits and underscores")
    advice = "this label belongs to Prometheus or to gradexporter; choose another"
    _check(label not in RESERVED_LABELS, name, label, advice)
