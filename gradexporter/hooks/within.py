"""What compiled code tells a capture while it runs, and what differs from the same events outside of it.

Compiled code runs without grad mode; whether an output belongs to training was settled when it was traced, but for
the mode of the model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradexporter.hooks.guarded import fenced

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture


@fenced
def entering(capture: Capture) -> None:
    """The watched model is about to run, with or without grad mode."""
    model = capture.model
    training = model is not None and (model.training or capture.mode.trains_in_eval)
    if training:
        capture.begin_forward()
    capture.mode.enter("train" if training else "eval")


@fenced
def given(capture: Capture, tensor: Tensor) -> None:
    """The watched model was given ``tensor``, in grad mode."""
    if measures(capture) is not None and not capture.observed.sources["input"]:
        capture.observed.measure_range("input", tensor)


def measures(capture: Capture) -> bool | None:
    """Whether outputs are measured in full; None if not at all."""
    model = capture.model
    if not capture.alive or model is None or torch._C._current_graph_task_id() != -1:
        return None
    capture.mode.trained_in[model.training] = True
    return capture.full_activations if model.training or capture.mode.trains_in_eval else None


@fenced
def returned(capture: Capture, layer: int, output: Tensor) -> None:
    """A layer has returned ``output``, in grad mode."""
    if measures(capture) is not None and not capture.outputs.passed_over(layer):
        began = time.perf_counter()
        capture.measure_output(layer, output)
        capture.activation_seconds += time.perf_counter() - began


def launched(capture: Capture, layer: int) -> bool | None:
    """The output of a layer is about to be measured on an accelerator: whether in full; None if not at all."""
    full = measures(capture)
    if full is not None:
        with capture.fence.guarding("hooks"):
            capture.seal()
            capture.outputs.ran(layer)
    return full


@fenced
def step_ends(capture: Capture, index: int, optimizer: Any) -> None:
    """``step()`` has done its work, but what it computed is in place only when its code has returned."""
    capture.seal()
    capture.ending = (index, optimizer)
