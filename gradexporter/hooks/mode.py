"""Whether the model trains at the moment: which forwards count, and the phase that the run is in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Mode:
    """What forwards and updates say of the mode of the model; ``phase`` is told of a change and returns at once."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self.in_training_forward = False
        self.trains_in_eval = False
        """Whether the last update came of forwards in eval mode alone."""
        self.trained_in = {True: False, False: False}
        """Modes of ``training`` in which there were forwards with gradients since the last update."""
        self._phase = phase
        self._now = "train"

    def entering(self, module: nn.Module) -> bool:
        """The watched model is about to run; whether that is training."""
        grad = torch.is_grad_enabled()
        self.in_training_forward = grad and (module.training or self.trains_in_eval)
        if grad:
            self.trained_in[module.training] = True
        self.enter("train" if module.training or self.in_training_forward else "eval")
        return self.in_training_forward

    def enter(self, phase: str) -> None:
        """The run is in this phase from now on."""
        if phase != self._now:
            self._now = phase
            self._phase(phase)

    def measures(self, model: nn.Module | None) -> bool:
        """Whether an output belongs to training; reentrant checkpointing runs its forward without grad mode."""
        if self.in_training_forward:
            return True
        return torch.is_grad_enabled() and model is not None and (model.training or self.trains_in_eval)

    def updated(self) -> None:
        """An update ends a stretch of training."""
        if self.trained_in[True] or self.trained_in[False]:
            self.trains_in_eval = not self.trained_in[True]
            self.trained_in = {True: False, False: False}
        self.enter("train")
