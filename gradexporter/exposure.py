"""Which layers are named on an endpoint: the series budget of one rank.

Layers beyond the budget are folded into blocks, the worst by spike ratio stay named, and what is left
out is counted. Away from global rank 0 a healthy rank names no layer at all: under data parallelism
its values are those of rank 0, and of a model that is spread over ranks each has a share, named when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradexporter.records import LayerTable, Mask, Snapshot, State, StepReport, Values

RUN_SERIES = 190
"""Series kept free for everything that is not a layer or a parameter group."""

LAYER_FAMILIES = 12
"""Series that one layer can have."""

CALM_RATIO = 3.0
"""Below it a layer's spike ratio is noise: naming by it would name every layer in turn, each a new series."""

_ROOT_OF_SQUARES = frozenset({"gradient_norm", "parameter_norm"})
_SUMMED = frozenset({"gradient_nonfinite", "activation_nonfinite"})

Owners = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A snapshot as one endpoint shows it; what catalogue entries are read from."""

    snapshot: Snapshot
    layers: LayerTable
    """Named layers, then blocks (``encoder.*``); a block covers all its layers, named or not."""
    layer_totals: LayerTable
    """Counts since the start for the rows of ``layers``."""
    rows: tuple[tuple[str], ...] = ()
    """Names of ``layers`` as label values."""
    learning_rates: tuple[tuple[str, float], ...] = ()
    """Parameter group and its rate; the groups of a second optimizer are 1.0, 1.1 and so on."""
    series_dropped: int = 0


class Exposure:
    """Chooses what one endpoint shows; a view depends on the snapshot alone. Any thread may ask."""

    def __init__(self, max_series: int) -> None:
        self._spare = max(LAYER_FAMILIES, max_series - RUN_SERIES)
        self._known = _Names((), 0)
        self._rows: tuple[tuple[str], ...] = ()

    def view(self, snapshot: Snapshot) -> View:
        """The view of this snapshot under the budget."""
        rates = _learning_rates(snapshot.reports)
        shown_rates = rates[: self._spare // 4]
        most = max(1, (self._spare - len(shown_rates)) // LAYER_FAMILIES)
        known = self._names(snapshot.layers.names, most)
        layers, totals = known.distinct(snapshot.layers), known.distinct(snapshot.layer_totals)
        dropped = len(rates) - len(shown_rates)
        if len(known.names) > most:
            count = max(0, most - len(known.blocks))
            dropped += (len(known.names) - count) * LAYER_FAMILIES
            named = _worst(layers, totals, _culprits(snapshot.reports), count)
            layers, totals = known.folded(layers, named), known.folded(totals, named)
        if snapshot.identity.rank != 0 and not _names_layers(snapshot):
            layers = totals = LayerTable()
        return View(
            snapshot=snapshot,
            layers=layers,
            layer_totals=totals,
            rows=self._rows_of(layers.names),
            learning_rates=shown_rates,
            series_dropped=dropped,
        )

    def _rows_of(self, names: tuple[str, ...]) -> tuple[tuple[str], ...]:
        """The same object as long as the names are the same, so that a renderer need not compare them one by one."""
        rows, known = tuple(zip(names, strict=True)), self._rows
        if rows == known:
            return known
        self._rows = rows
        return rows

    def _names(self, names: tuple[str, ...], most: int) -> _Names:
        known = self._known
        if known.given != names or known.most != most:
            known = self._known = _Names(names, most)
        return known


def _names_layers(snapshot: Snapshot) -> bool:
    """Whether a rank above 0 names layers: while it is unhealthy, and a share that was asked for."""
    calm = snapshot.state in (None, State.WARMING_UP, State.HEALTHY)
    return not calm or (snapshot.itself.norms == "share" and snapshot.itself.layer_shares)


class _Names:
    """What follows from the names of the layers alone."""

    def __init__(self, given: tuple[str, ...], most: int) -> None:
        self.given = given
        self.most = most
        self.names = tuple(dict.fromkeys(given))
        self._rows = _owners(given, self.names)
        block_of = blocks(self.names, max(1, most // 2))
        self.blocks = tuple(dict.fromkeys(block_of))
        self._members = _owners(block_of, self.blocks)

    def distinct(self, table: LayerTable) -> LayerTable:
        """One row a layer, where two optimizers share some."""
        if len(self.names) == len(self.given):
            return table
        return LayerTable(self.names, _folded(table, self._rows, len(self.names)))

    def folded(self, table: LayerTable, named: Sequence[int]) -> LayerTable:
        """The rows of the named layers, then one a block."""
        folds = _folded(table, self._members, len(self.blocks))
        columns = {
            column: (
                np.concatenate([values[named], folds[column][0]]),
                np.concatenate([observed[named], folds[column][1]]),
            )
            for column, (values, observed) in table.columns.items()
        }
        return LayerTable(tuple(self.names[index] for index in named) + self.blocks, columns)


def blocks(names: Sequence[str], most: int) -> tuple[str, ...]:
    """The block of each name: the longest common depth of prefix with at most ``most`` blocks."""
    parts = [name.split(".") for name in names]
    chosen = ("*",) * len(parts)
    for depth in range(1, max(map(len, parts), default=0)):
        candidate = tuple(".".join(part[:depth]) + ".*" for part in parts)
        if len(set(candidate)) > most:
            break
        chosen = candidate
    return chosen


def _learning_rates(reports: Iterable[StepReport]) -> tuple[tuple[str, float], ...]:
    rates: list[tuple[str, float]] = []
    for report in reports:
        groups = report.group_learning_rates
        if not groups and report.learning_rate is not None:
            groups = (report.learning_rate,)
        before = f"{report.optimizer}." if report.optimizer else ""
        rates += ((f"{before}{index}", rate) for index, rate in enumerate(groups))
    return tuple(rates)


def _culprits(reports: Iterable[StepReport]) -> set[str | None]:
    """Layers that a verdict names; an alert that names one must find its series."""
    found: set[str | None] = set()
    for report in reports:
        found.update(finding.layer for finding in report.findings)
        if report.diagnosis is not None:
            found.add(report.diagnosis.layer)
        if report.first_nonfinite is not None:
            found.add(report.first_nonfinite.layer)
    return found


def _worst(table: LayerTable, totals: LayerTable, culprits: set[str | None], count: int) -> list[int]:
    """Positions of the layers that stay named, in the order of the model."""
    badness = np.zeros(len(table))
    pair = table.column("spike_ratio")
    if pair is not None:
        ratios = np.where(np.isnan(pair[0]), np.inf, pair[0])
        badness = np.where(pair[1] & (ratios >= CALM_RATIO), ratios, 0.0)
    for values, observed in totals.columns.values():
        badness = np.where(observed & (values > 0), np.inf, badness)
    named_by_verdict = np.array([name in culprits for name in table.names], dtype=bool)
    order = np.lexsort((-badness, ~named_by_verdict))
    return sorted(order[:count].tolist())


def _owners(names: Sequence[str], groups: Sequence[str]) -> Owners:
    position = {group: index for index, group in enumerate(groups)}
    return np.array([position[name] for name in names], dtype=np.intp)


def _folded(table: LayerTable, owners: Owners, size: int) -> dict[str, tuple[Values, Mask]]:
    """Each column with the rows of one owner made one: norms by root of sum of squares, counts by sum, else maxima.

    NaN stays NaN: a block with one lost layer is lost.
    """
    columns: dict[str, tuple[Values, Mask]] = {}
    for column, (values, observed) in table.columns.items():
        owner, readings = owners[observed], values[observed]
        seen = np.zeros(size, dtype=bool)
        seen[owner] = True
        with np.errstate(all="ignore"):
            if column in _SUMMED:
                folded = np.zeros(size)
                np.add.at(folded, owner, readings)
            else:
                folded = np.full(size, -np.inf)
                np.maximum.at(folded, owner, readings)
                if column in _ROOT_OF_SQUARES:
                    folded = _norm(owner, readings, folded)
        columns[column] = (folded, seen)
    return columns


def _norm(owner: Owners, norms: Values, largest: Values) -> Values:
    """Root of the sum of squares; scaled by the largest, so that it overflows only where the norm does."""
    scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1.0)
    squares = np.zeros(len(largest))
    np.add.at(squares, owner, (norms / scale[owner]) ** 2)
    return scale * np.sqrt(squares)
