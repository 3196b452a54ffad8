"""The hooks on layers and on their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradexporter.hooks import compiled, points
from gradexporter.hooks.late import LateHooks
from gradexporter.hooks.watched import Watched
from gradexporter.readback import Pending

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture

_FAST_PATHS = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
"""Modules that compute otherwise in eval when a module inside them has hooks."""


class LayerHooks:
    """Sets and removes them together."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self._handles: list[Any] = []
        self._sheltered: dict[int, nn.Module] = {}
        self._put_aside: dict[int, Any] = {}
        self._late: LateHooks | None = None
        self._hidden: list[nn.Module] = []

    def attach(self, capture: Capture, model: nn.Module, optimizers: Sequence[Watched]) -> torch.device:
        """Forward hooks on the layers of ``capture``, gradient hooks on the parameters of its optimizers.

        Called again after layers were found anew it leaves alone the forward hooks that are already there:
        compiled code would not survive their removal. Returns where the model computes.
        """
        place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        sheltered = {id(part) for fast in model.modules() if isinstance(fast, _FAST_PATHS) for part in fast.modules()}
        gone = self._outputs
        self._outputs, self._sheltered = {}, {}
        for index, layer in enumerate(capture.layers):
            if layer.module is None:
                continue
            output = gone.pop(id(layer.module), None)
            if output is None:
                where, kept = _place(layer.module, place), compiled.keeps_output(layer.module)
                output = _Output(layer.module, points.LayerOutput(capture, index, where, kept=kept))
            output.hook.layer = index
            self._outputs[id(layer.module)] = output
            if id(layer.module) in sheltered:
                self._sheltered[output.handle.id] = layer.module
        for output in gone.values():
            output.handle.remove()
        self._hook_parameters(capture, optimizers)
        if self._late is not None:
            self._late.arrange(capture.layers)
        else:
            self._hidden = compiled.hidden(output.module for output in self._outputs.values())
            self._late = LateHooks(capture, model, place, hidden=bool(self._hidden))
        return place

    def passed_over(self, watched: Watched, pending: Pending) -> bool:
        """Whether compiled code is known to pass over hooks on layers of this optimizer."""
        if self._late is None or self._late.settled or pending.order is None:
            return False
        graded = {watched.plan.indexes[watched.plan.owners[at]] for at in watched.positions}
        return self._late.passed_over(pending.order, watched.plan.indexes, graded)

    @property
    def rows(self) -> Mapping[int, Tensor]:
        """By layer what compiled code adds to on an accelerator."""
        marks = [(output.hook.layer, output.hook.mark) for output in self._outputs.values()]
        return {layer: mark.row for layer, mark in marks if mark is not None and mark.adds_up}

    def _hook_parameters(self, capture: Capture, optimizers: Sequence[Watched]) -> None:
        self._unhook_parameters()
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

    def _unhook_parameters(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        self._unhook_parameters()
        while self._outputs:
            self._outputs.popitem()[1].handle.remove()
        if self._late is not None:
            self._late.detach()
            self._late = None
        compiled.shown(self._hidden)
        self._hidden = []
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


class _Output:
    """The forward hook of one layer."""

    __slots__ = ("handle", "hook", "module")

    def __init__(self, module: nn.Module, hook: points.LayerOutput) -> None:
        self.module = module  # alive as long as its identity is a key
        self.hook = hook
        self.handle = module.register_forward_hook(hook)


def _place(module: nn.Module, otherwise: torch.device) -> torch.device:
    return next((parameter.device for parameter in module.parameters(recurse=False)), otherwise)
