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
            watched.accumulated = points.Accumulated(capture, watched)
            watched.accumulated.one_by_one = not watched.announced  # until a backward has left its gradients
            watched.unhooked = list(watched.accumulators)
            self.attach_trained(watched)

    def attach_trained(self, watched: Watched) -> None:
        """Gradient hooks on those parameters of an optimizer that take a gradient by now."""
        for parameter in watched.unhooked:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(watched.accumulated)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                # Ours first: a hook of the user's may update the parameter and clear its gradient.
                hooks = parameter._post_accumulate_grad_hooks
                for key in [key for key in hooks if key != handle.id]:
                    hooks[key] = hooks.pop(key)  # torch goes by the order of insertion
        watched.unhooked = [parameter for parameter in watched.unhooked if not parameter.requires_grad]

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
