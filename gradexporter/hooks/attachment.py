"""The hooks on layers and on their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gradexporter.hooks import points
from gradexporter.hooks.watched import Watched

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture

_FAST_PATHS = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
"""Modules that compute otherwise in eval when a module inside them has hooks."""


class LayerHooks:
    """Sets and removes them together."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._sheltered: dict[int, nn.Module] = {}
        self._put_aside: dict[int, Any] = {}

    def attach(self, capture: Capture, model: nn.Module, optimizers: Sequence[Watched]) -> None:
        """Forward hooks on the layers of ``capture``, gradient hooks on the parameters of its optimizers."""
        sheltered = {id(part) for fast in model.modules() if isinstance(fast, _FAST_PATHS) for part in fast.modules()}
        for index, layer in enumerate(capture.layers):
            if layer.module is None:
                continue
            handle = layer.module.register_forward_hook(points.LayerOutput(capture, index))
            self._handles.append(handle)
            if id(layer.module) in sheltered:
                self._sheltered[handle.id] = layer.module
        for watched in optimizers:
            hook = points.Accumulated(capture, watched)
            for parameter in watched.accumulators:
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
        self._sheltered, self._put_aside = {}, {}

    def shelter(self, training: bool) -> None:
        """Takes hooks off modules that leave a fast path, with other rounding, when they have any in eval."""
        for key, module in self._sheltered.items():
            if training:
                if key in self._put_aside:
                    module._forward_hooks[key] = self._put_aside.pop(key)
            else:
                hook = module._forward_hooks.pop(key, None)
                if hook is not None:
                    self._put_aside[key] = hook
