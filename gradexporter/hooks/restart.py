"""What an optimizer brings into the first update of a run that is continued: was its state restored?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradexporter import stats
from gradexporter.hooks.watched import Watched
from gradexporter.readback import Number


class Restart:
    """Looks at the state of one optimizer before and after one update."""

    def __init__(self) -> None:
        self._was_empty = False
        self._largest: Number | None = None

    def update_begins(self, watched: Watched) -> None:
        """Looks at what is there."""
        self._was_empty = not any(_states(watched))
        self._largest = None if self._was_empty else _largest(watched)

    def brought(self, watched: Watched) -> Number | None:
        """Largest value that the state held before the update, still on its device.

        0 for an optimizer that began with nothing and keeps a state, or that has made no update by its own count;
        None where nothing tells.
        """
        if self._was_empty:
            return 0.0 if any(_states(watched)) else None
        return self._largest


def _states(watched: Watched) -> Iterator[Mapping[str, Any]]:
    """What the optimizer keeps about each parameter; not about those where that is nothing."""
    for parameter in watched.parameters:
        state = watched.keeper.state.get(parameter)
        if state and any(value is not None for value in state.values()):
            yield state


def _largest(watched: Watched) -> Number | None:
    states = list(_states(watched))
    tensors = [
        value
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and value.dtype in stats.FLOATING and value.numel()
    ]
    if not tensors:
        return None
    largest, _ = stats.extremes([stats.measure(tensors, norms=False)])
    counts = [state["step"] for state in states if "step" in state]
    away = [count for count in counts if isinstance(count, Tensor) and count.device.type != "cpu"]
    if not away:
        return 0.0 if counts and not any(counts) else largest
    made = torch.stack([count.detach().double().reshape(()) for count in away]).amax()
    there = torch.as_tensor(largest, dtype=torch.float64).to(made.device, non_blocking=True)
    return torch.where(made > 0, there, torch.zeros_like(there))
