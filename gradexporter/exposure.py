"""Which layers are named on an endpoint: the series budget of one rank.

Layers beyond the budget are folded into blocks, the worst by spike ratio stay named, and what is left
out is counted. Away from global rank 0 a healthy rank names no layer at all: under data parallelism
its values are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradexporter.records import LayerTable, Mask, Snapshot, State, Values

CORE_SERIES = 180
"""Series kept free for the run level, process and exporter families."""

LAYER_FAMILIES = 12
"""Series that one layer can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A snapshot as one endpoint shows it; what catalogue entries are read from."""

    snapshot: Snapshot
    layers: LayerTable
    """Named layers, then blocks (``encoder.*``); a block covers all its layers, named or not."""
    layer_gradient_nonfinite: Mapping[str, float]
    layer_activation_nonfinite: Mapping[str, float]
    series_dropped: int = 0


class Exposure:
    """Chooses what one endpoint shows; used by one thread."""

    def __init__(self, max_series: int) -> None:
        self._most = max(1, (max_series - CORE_SERIES) // LAYER_FAMILIES)
        self._dropped: set[str] = set()
        self._blocks_of: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def view(self, snapshot: Snapshot) -> View:
        """The view of this snapshot under the budget."""
        table = snapshot.layers
        if snapshot.identity.rank != 0 and snapshot.state in (None, State.WARMING_UP, State.HEALTHY):
            return self._view(snapshot, LayerTable(), {}, {})
        gradients, activations = snapshot.layer_gradient_nonfinite, snapshot.layer_activation_nonfinite
        if len(table) <= self._most:
            return self._view(snapshot, table, gradients, activations)
        blocks = self._blocks(table.names)
        groups = tuple(dict.fromkeys(blocks))
        named = _worst(table, self._most - len(groups))
        kept = {table.names[index] for index in named}
        self._dropped.update(name for name in table.names if name not in kept)
        return self._view(
            snapshot,
            _grouped(table, named, blocks, groups),
            _summed(gradients, kept, dict(zip(table.names, blocks, strict=True))),
            _summed(activations, kept, dict(zip(table.names, blocks, strict=True))),
        )

    def _view(
        self, snapshot: Snapshot, layers: LayerTable, gradients: Mapping[str, float], activations: Mapping[str, float]
    ) -> View:
        return View(
            snapshot=snapshot,
            layers=layers,
            layer_gradient_nonfinite=gradients,
            layer_activation_nonfinite=activations,
            series_dropped=len(self._dropped) * LAYER_FAMILIES,
        )

    def _blocks(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self._blocks_of[0] != names:
            self._blocks_of = (names, blocks(names, max(1, self._most // 2)))
        return self._blocks_of[1]


def blocks(names: tuple[str, ...], most: int) -> tuple[str, ...]:
    """The block of each name: the longest common depth of prefix with at most ``most`` blocks."""
    chosen = ("*",) * len(names)
    for depth in range(1, max((name.count(".") for name in names), default=0) + 1):
        candidate = tuple(".".join(name.split(".")[:depth]) + ".*" for name in names)
        if len(set(candidate)) > most:
            break
        chosen = candidate
    return chosen


def _worst(table: LayerTable, count: int) -> list[int]:
    pair = table.column("spike_ratio")
    ratios = np.zeros(len(table)) if pair is None else np.where(pair[1], pair[0], 0.0)
    ratios = np.where(np.isnan(ratios), np.inf, ratios)
    for column in ("gradient_nonfinite", "activation_nonfinite"):
        bad = table.column(column)
        if bad is not None:
            ratios = np.where(bad[1] & (bad[0] > 0), np.inf, ratios)
    order = np.argsort(-ratios, kind="stable")[: max(0, count)]
    return sorted(int(index) for index in order)


def _grouped(table: LayerTable, named: list[int], blocks: tuple[str, ...], groups: tuple[str, ...]) -> LayerTable:
    position = {group: index for index, group in enumerate(groups)}
    owner = np.array([position[block] for block in blocks])
    columns: dict[str, tuple[Values, Mask]] = {}
    for column, (values, observed) in table.columns.items():
        folded = np.full(len(groups), np.nan)
        seen = np.zeros(len(groups), dtype=bool)
        np.logical_or.at(seen, owner[observed], True)
        squares = column in ("gradient_norm", "parameter_norm")
        source = values[observed] ** 2 if squares else values[observed]
        start = np.where(seen, 0.0 if squares else -np.inf, np.nan)
        (np.add if squares else np.maximum).at(start, owner[observed], source)
        folded = np.sqrt(start) if squares else start
        columns[column] = (np.concatenate([values[named], folded]), np.concatenate([observed[named], seen]))
    return LayerTable(tuple(table.names[index] for index in named) + groups, columns)


def _summed(totals: Mapping[str, float], kept: set[str], block: Mapping[str, str]) -> dict[str, float]:
    shown = {name: total for name, total in totals.items() if name in kept}
    for name, total in totals.items():
        shown[block[name]] = shown.get(block[name], 0.0) + total
    return shown
