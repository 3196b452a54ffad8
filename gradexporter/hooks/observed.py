"""What the loop hands over in the step being built: losses, and the ranges of its batches."""

from __future__ import annotations

import collections
from typing import Any

from gradexporter import stats
from gradexporter.hooks.batch import MOST_PARTS, floating
from gradexporter.readback import Number, Pending


class Observed:
    """Losses and ranges since the last step closed; keeps no tensor of the user."""

    def __init__(self) -> None:
        self.losses: collections.deque[Number] = collections.deque(maxlen=MOST_PARTS)
        self.sources: dict[str, bool] = {"input": False, "target": False}
        """Which of them the user gives; else the model's own inputs are measured."""
        self.loss_comes_first = False
        """Whether the loop observes a loss before its backward."""
        self.backward_seen = False
        self._ranges: dict[str, list[stats.Block]] = {"input": [], "target": []}

    def add_loss(self, loss: Number) -> None:
        """Adds a loss to the step being built."""
        self.loss_comes_first = not self.backward_seen
        self.losses.append(loss)

    def measure_range(self, name: str, batch: Any) -> None:
        """Adds the range of the floating tensors of a batch."""
        tensors = [tensor for tensor in map(stats.plain, floating(batch)) if tensor.numel()]
        if tensors:
            ranges = self._ranges[name]
            if len(ranges) >= MOST_PARTS:
                del ranges[0]
            ranges.append(stats.extents(tensors))

    def take_losses(self) -> list[Number]:
        """The losses, for the step that closes; the next one starts without."""
        losses, self.losses = list(self.losses), collections.deque(maxlen=MOST_PARTS)
        return losses

    def close(self, pending: Pending) -> None:
        """Puts the ranges into a closing step."""
        for name, ranges in self._ranges.items():
            if ranges:
                pending.numbers[f"{name}_max_abs"], pending.numbers[f"{name}_nonfinite"] = stats.extremes(ranges)

    def start_afresh(self) -> None:
        """The next step begins."""
        self._ranges = {"input": [], "target": []}
        self.backward_seen = False
