"""Outputs of the layers in the step being built."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradexporter import stats
from gradexporter.hooks import compiled
from gradexporter.hooks.batch import floating
from gradexporter.readback import Pending
from gradexporter.records import Values

MEASURED_CALLS = 16
"""Calls of one layer in one step that are measured in full."""

CHECKED_CALLS = 256
"""Calls of one layer in one step that are all checked for values that are not finite; after them one in 16 is."""


class Outputs:
    """What the layers returned since the last step closed, as sums; keeps no tensor of the user."""

    def __init__(self, layers: int) -> None:
        self._order = [-1.0] * layers  # lists: setting one number is faster than in an array
        self._calls = [0] * layers
        self._dtypes = [torch.float32] * layers
        self._accumulators: dict[torch.device, stats.host.Accumulator | stats.device.Accumulator] = {}
        self._rank = 0

    def seen(self, layer: int) -> bool:
        """Whether the layer has returned something in this step."""
        return self._order[layer] >= 0

    def passed_over(self, layer: int) -> bool:
        """Whether this call of a layer is not looked at: what a step costs is bounded, however often a layer runs."""
        calls = self._calls[layer]
        if calls < CHECKED_CALLS:
            return False
        self._calls[layer] = calls + 1
        return calls % 16 != 0

    def add(self, layer: int, output: Any, *, full: bool) -> None:
        """Measures what a layer returned; a plain sentinel when not ``full`` or called often."""
        calls = self._calls[layer]
        if calls < CHECKED_CALLS:
            self._calls[layer] = calls + 1
        full = full and calls < MEASURED_CALLS
        known = type(output) is Tensor and output.dtype is self._dtypes[layer]
        accumulator = self._accumulators.get(output.device) if known else None
        if accumulator is not None and output.numel():  # nearly always
            accumulator.add(layer, output, full=full)
        elif type(output) is Tensor and output.dtype in stats.ORDINARY_DTYPES and not output.is_meta:
            self._add(layer, output, full)
        else:
            for tensor in floating(output):
                self._add(layer, stats.plain(tensor), full)
        self.ran(layer)

    def ran(self, layer: int) -> None:
        """The layer is the latest to have returned."""
        if self._order[layer] != self._rank - 1 or not self._rank:  # not another part of what it just returned
            self._order[layer] = self._rank
            self._rank += 1

    def _add(self, layer: int, tensor: Tensor, full: bool) -> None:
        if not tensor.numel():
            return
        accumulator = self._accumulators.get(tensor.device)
        if accumulator is None:
            accumulator = stats.accumulator(len(self._order), tensor.device)
            self._accumulators[tensor.device] = accumulator
        self._dtypes[layer] = tensor.dtype
        accumulator.add(layer, tensor, full=full)

    def close(self, layers: Sequence[int], pending: Pending, rows: Mapping[int, Tensor]) -> bool:
        """Moves the sums of these layers into a closing step; whether any of them ran.

        ``rows`` holds what compiled code has measured of a layer on an accelerator.
        """
        whole = len(layers) == len(self._order)  # one optimizer has them all, in order
        pending.order = np.array(self._order if whole else [self._order[layer] for layer in layers])
        dtypes = self._dtypes if whole else [self._dtypes[layer] for layer in layers]
        pending.dtype_max = _largest_of(dtypes)
        for place, accumulator in self._accumulators.items():
            pending.blocks[f"activations {place}"] = accumulator.take(layers)
        if whole:
            self._order = [-1.0] * len(layers)
            self._calls = [0] * len(layers)
        else:
            for layer in layers:
                self._order[layer] = -1.0
                self._calls[layer] = 0
        self._rank = 0
        for place in compiled.in_use:
            _close_rows(place, layers, pending, rows)
        return bool((pending.order >= 0).any()) or any(name.startswith("compiled") for name in pending.blocks)


def _close_rows(place: torch.device, layers: Sequence[int], pending: Pending, rows: Mapping[int, Tensor]) -> None:
    there = [rows[layer] for layer in layers if layer in rows and rows[layer].device == place]
    if there:
        nothing = torch.zeros_like(there[0])
        held = [rows[layer] if layer in rows and rows[layer].device == place else nothing for layer in layers]
        pending.blocks[f"compiled {place}"] = torch.stack(held, dim=1)
        torch._foreach_zero_(there)


def _largest_of(dtypes: Sequence[torch.dtype]) -> Values:
    if len(set(dtypes)) == 1:
        return np.full(len(dtypes), _largest(dtypes[0]))
    return np.array([_largest(dtype) for dtype in dtypes], dtype=np.float64)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max
