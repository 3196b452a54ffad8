"""The records that pass between rooms: plain, frozen, without torch.

Everything after this module runs, replays from a file and is tested without a tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT_LAYER = "(root)"
"""Name of a layer that is the watched module itself; an empty label would be no label at all."""

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite float32; the ``dtype_max`` of a report that does not say otherwise."""


class _Word(str, Enum):
    """An enum whose members are the words that labels, JSON and people see."""

    __hash__ = str.__hash__  # Enum hashes its name: a word would equal its member and yet miss it in a dict

    def __str__(self) -> str:
        return str(self.value)


class Quantity(_Word):
    """What was measured, in the order in which a step produces it."""

    INPUT = "input"
    TARGET = "target"
    ACTIVATION = "activation"
    LOSS = "loss"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    UPDATE = "update"
    LEARNING_RATE = "learning_rate"
    LOSS_SCALE = "loss_scale"


NONFINITE_QUANTITIES = (
    Quantity.INPUT,
    Quantity.ACTIVATION,
    Quantity.LOSS,
    Quantity.GRADIENT,
    Quantity.PARAMETER,
    Quantity.OPTIMIZER_STATE,
)
"""Quantities whose non-finite elements are counted, in execution order."""


class State(_Word):
    """The health of a run after a step; ``code`` orders them from calm to lost."""

    WARMING_UP = "warming_up"
    HEALTHY = "healthy"
    SPIKE = "spike"
    CASCADE = "cascade"
    NONFINITE = "nonfinite"

    @property
    def code(self) -> int:
        """0 warming up, 1 healthy, 2 spike, 3 cascade, 4 non-finite."""
        return _STATE_CODES[self]


_STATE_CODES = {state: code for code, state in enumerate(State)}


class Severity(_Word):
    """How loud a finding is: critical pages somebody, warning makes a ticket."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def code(self) -> int:
        """0 info, 1 warning, 2 critical."""
        return _SEVERITY_CODES[self]


_SEVERITY_CODES = {severity: code for code, severity in enumerate(Severity)}


class FindingKind(_Word):
    """What can be odd about one step."""

    GRADIENT_SPIKE = "gradient_spike"
    GRADIENT_CASCADE = "gradient_cascade"
    GRADIENT_GROWTH = "gradient_growth"
    ACTIVATION_GROWTH = "activation_growth"
    OVERFLOW_IMMINENT = "overflow_imminent"
    NONFINITE = "nonfinite"
    OPTIMIZER_STATE_JUMP = "optimizer_state_jump"
    UPDATE_JUMP = "update_jump"
    LOSS_SPIKE = "loss_spike"
    SCALE_COLLAPSE = "scale_collapse"
    STALLED_UPDATES = "stalled_updates"
    DEAD_LAYER = "dead_layer"
    VANISHING_GRADIENT = "vanishing_gradient"
    OSCILLATION = "oscillation"
    INPUT_NONFINITE = "input_nonfinite"
    INPUT_OUT_OF_RANGE = "input_out_of_range"
    LEARNING_RATE_JUMP = "learning_rate_jump"


class Shape(_Word):
    """What findings amount to: the way in which a run fails."""

    NAN_FROM_START = "nan_from_start"
    OSCILLATION = "oscillation"
    EXPLODING_GRADIENT = "exploding_gradient"
    SPIKE_CASCADE = "spike_cascade"
    BAD_BATCH = "bad_batch"
    UNDEFINED_OPERATION = "undefined_operation"
    BAD_INPUT = "bad_input"
    HALF_PRECISION_OVERFLOW = "half_precision_overflow"
    LOSS_SCALE_COLLAPSE = "loss_scale_collapse"
    RESUME_MISMATCH = "resume_mismatch"
    DEAD_OR_VANISHING = "dead_or_vanishing"
    STALLED_UPDATES = "stalled_updates"
    HARDWARE_SUSPECT = "hardware_suspect"
    SPIKE_RECOVERED = "spike_recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """One layer in one step; ``None`` means not observed, which is never 0.

    Gradients are taken before clipping and divided by the loss scale; parameters and optimizer
    state after the update. A layer folds every parameter that its module owns directly.
    """

    layer: str
    gradient_norm: float | None = None
    gradient_max_abs: float | None = None
    gradient_nonfinite: float | None = None
    activation_rms: float | None = None
    activation_max_abs: float | None = None
    activation_nonfinite: float | None = None
    activation_zero_ratio: float | None = None
    parameter_norm: float | None = None
    parameter_max_abs: float | None = None
    update_ratio: float | None = None
    momentum_max_abs: float | None = None
    second_moment_max_abs: float | None = None
    dtype_max: float | None = None
    execution_order: float | None = None
    """Rank in which the layer's forward returned in this step, from 0; None if it did not run."""
    spike_ratio: float | None = None
    """Gradient norm over its own baseline, set by the judge; None before a baseline exists."""


LAYER_COLUMNS = tuple(f.name for f in dataclasses.fields(LayerStats) if f.name != "layer")
"""Statistics that a LayerTable can hold, one numpy array each."""

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """All layers of one step in columns: names once, one float64 array a statistic.

    A column is a pair ``(values, observed)``. Where ``observed`` is False the value means nothing;
    where it is True a NaN is a reading. A statistic that no layer has is missing from ``columns``.
    """

    names: tuple[str, ...] = ()
    columns: Mapping[str, tuple[Values, Mask]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[LayerStats]) -> LayerTable:
        """The table of these rows, in their order."""
        listed = list(rows)
        columns: dict[str, tuple[Values, Mask]] = {}
        for name in LAYER_COLUMNS:
            cells = [getattr(row, name) for row in listed]
            observed = np.array([cell is not None for cell in cells], dtype=bool)
            if observed.any():
                filled = [np.nan if cell is None else float(cell) for cell in cells]
                columns[name] = (np.array(filled, dtype=np.float64), observed)
        return cls(tuple(row.layer for row in listed), columns)

    def __len__(self) -> int:
        return len(self.names)

    def column(self, name: str) -> tuple[Values, Mask] | None:
        """``(values, observed)`` of a statistic, or None if no layer has it in this step."""
        return self.columns.get(name)

    def with_column(self, name: str, values: Values, observed: Mask) -> LayerTable:
        """This table with one statistic set."""
        return LayerTable(self.names, {**self.columns, name: (values, observed)})

    def rows(self) -> Iterator[LayerStats]:
        """One LayerStats a layer, for people and tests; judging never needs it."""
        for index, name in enumerate(self.names):
            cells = {
                column: float(values[index]) for column, (values, observed) in self.columns.items() if observed[index]
            }
            yield LayerStats(layer=name, **cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One odd thing about one step."""

    kind: FindingKind
    severity: Severity
    step: int
    layer: str | None = None
    """Layer that it is about, or None where it is the whole model."""
    quantity: Quantity
    value: float | None = None
    baseline: float | None = None
    """What the value usually is, in its own unit; None where there is no usual."""
    ratio: float | None = None
    """``value / baseline``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the findings amount to, since when, on what evidence, and what to do about it."""

    shape: Shape
    severity: Severity
    layer: str | None = None
    quantity: Quantity | None = None
    since_step: int
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """Where the first non-finite value of a run appeared, producer before propagators."""

    step: int
    layer: str
    """Layer name, or ``loss`` or ``input`` where no layer produced it."""
    quantity: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer update, measured and, after the judge, judged.

    Every default means "not observed", never 0. The gradient is the one that the optimizer was about
    to use, before clipping, divided by the loss scale; momentum and parameters are taken after the
    update. All values are this rank's share unless the framework had already reduced them. Of parameters that
    lie on several ranks a norm counts in shares, so that squares can be added over the ranks; a maximum is local.
    """

    step: int
    """Number of the update, from 1, applied or skipped."""
    loss: float | None = None
    gradient_norm: float | None = None
    gradient_max_abs: float | None = None
    activation_max_abs: float | None = None
    momentum_max_abs: float | None = None
    second_moment_max_abs: float | None = None
    parameter_max_abs: float | None = None
    parameter_norm: float | None = None
    update_ratio: float | None = None
    """L2 norm of the update over L2 norm of the parameters."""
    learning_rate: float | None = None
    """Largest rate of the parameter groups."""
    input_max_abs: float | None = None
    target_max_abs: float | None = None
    nonfinite: Mapping[str, float] = field(default_factory=dict)
    """Non-finite elements by quantity: input, activation, loss, gradient, parameter, optimizer_state."""
    applied: bool | None = None
    """False if a loss scaler skipped the update; None (unknown) is taken as applied."""
    layers: LayerTable = field(default_factory=LayerTable)
    dtype_max: float = FLOAT32_MAX
    """Largest finite value of the activations' dtype."""
    loss_scale: float | None = None
    clip_factor: float | None = None
    """What clipping multiplied the gradient by, 1.0 when it left it alone; None where it was not one factor."""
    clipped: bool | None = None
    """Whether clipping made the gradient smaller, by one factor or not."""
    optimizer: int = 0
    """Which of the watched optimizers made the update, from 0."""
    group_learning_rates: tuple[float, ...] = ()
    optimizer_state_before: float | None = None
    """Largest value that the optimizer brought into the first update of a continued run, 0 where it began with
    nothing; None in every other step, and where it keeps no state."""
    step_seconds: float | None = None
    """Seconds since the step before closed."""
    timestamp: float | None = None
    """Unix seconds at which the step closed."""

    state: State | None = None
    """Set by the judge, like everything below; None on a report that nobody has judged."""
    findings: tuple[Finding, ...] = ()
    diagnosis: Diagnosis | None = None
    last_healthy_step: int | None = None
    first_nonfinite: FirstNonfinite | None = None
    """The run's first, kept on every later report."""
    gradient_norm_baseline: float | None = None
    gradient_spike_ratio: float | None = None
    """Gradient norm over its baseline; None until a baseline exists, not finite where the norm is not."""
    overflow_headroom_decades: float | None = None
    """Decades between the largest magnitude and the largest finite value of its dtype."""
    steps_to_overflow: float | None = None
    """Steps until overflow if growth keeps accelerating; None unless in state spike or cascade."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is; ``run_id`` and ``rank`` go on every series, the rest on run_info."""

    run_id: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: str = "0"
    paging: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    """Free routing labels of the user (``team``, ...)."""
    model: str = ""
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What must be the same for the baselines of one optimizer to mean anything."""

    kind: str
    """Class of the optimizer."""
    layers: Mapping[str, int]
    """Elements of the parameters that it updates, by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfStats:
    """What the exporter knows about itself."""

    overhead_seconds: float = 0.0
    overhead_budget_exceeded: bool = False
    capture_every_steps: Mapping[str, int] = field(default_factory=dict)
    readback_lag_steps: int = 0
    reports_dropped: int = 0
    watched_layers: int = 0
    norms: str = "global"
    """What norms cover: ``global``, or the ``share`` of the model that lies on this rank."""
    layer_shares: bool = False
    """Whether a rank with a share names its layers even while it is healthy."""
    signal_available: Mapping[str, bool] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    """What reduces tensors, by type of device: ``stock`` or ``native``."""
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFinding:
    """The latest finding of one kind."""

    step: int
    timestamp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Cumulative counts by upper bound; finite observations only."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Cumulative, one a bound, the last bound being +Inf."""
    sum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole published state of one rank at one moment: what every sink reads.

    Immutable and complete: a reader takes one reference and never sees half a step.
    """

    identity: Identity
    reports: tuple[StepReport, ...] = ()
    """Latest report of each optimizer; empty before the first step."""
    readings: tuple[StepReport, ...] = ()
    """``reports`` in which statistics that are sampled keep their last reading."""
    layers: LayerTable = field(default_factory=LayerTable)
    """Last readings of the layers; a layer that two optimizers share has a row for each."""
    layer_totals: LayerTable = field(default_factory=LayerTable)
    """Non-finite elements since the start; the rows are those of ``layers``."""
    phase: str = "train"
    ended: str | None = None
    """None while the run goes on; else closed, exception or signal."""
    steps_applied: int = 0
    steps_skipped: int = 0
    step_seconds: float = 0.0
    clipped_steps: int = 0
    findings: Mapping[FindingKind, int] = field(default_factory=dict)
    last_findings: Mapping[FindingKind, LastFinding] = field(default_factory=dict)
    nonfinite_steps: Mapping[Quantity, int] = field(default_factory=dict)
    gradient_norm_peak: float | None = None
    gradient_spike_ratio_peak: float | None = None
    gradient_norms: Histogram = field(default_factory=Histogram)
    aligned_step: int | None = None
    """Last step that ``aligned_every`` divides: ranks that show the same one can be compared and added."""
    aligned_gradient_norm: float | None = None
    """Gradient norm of that step."""
    last_checkpoint_step: int | None = None
    last_checkpoint_timestamp: float | None = None
    last_clean_checkpoint_step: int | None = None
    itself: SelfStats = field(default_factory=SelfStats)

    @property
    def report(self) -> StepReport | None:
        """The latest report of any optimizer; None before the first step."""
        return max(self.reports, key=lambda report: (report.step, report.timestamp or 0.0), default=None)

    @property
    def state(self) -> State | None:
        """The worst state of the optimizers; None before the first step."""
        states = [report.state for report in self.reports if report.state is not None]
        return max(states, key=lambda state: state.code, default=None)


def to_plain(record: object) -> Any:
    """A record as strict JSON can hold it: enums as words, layers as rows, NaN and infinities as strings.

    ``None`` stays null, which is "not observed"; a reading that is not finite is "NaN", "+Inf" or "-Inf".
    """
    if isinstance(record, Enum):
        return to_plain(record.value)
    if record is None or isinstance(record, (bool, str, int)):
        return record
    if isinstance(record, float):
        value = float(record)
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if isinstance(record, np.generic):
        return to_plain(record.item())
    if isinstance(record, LayerTable):
        return [to_plain(row) for row in record.rows()]
    if isinstance(record, Mapping):
        return {str(key): to_plain(value) for key, value in record.items()}
    if dataclasses.is_dataclass(record):
        return {part.name: to_plain(getattr(record, part.name)) for part in dataclasses.fields(record)}
    if isinstance(record, Iterable):
        return [to_plain(item) for item in record]
    raise TypeError(f"no plain form of {type(record).__name__}")
