"""Compiled code that passes over our hooks, because it was compiled before they were there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradexporter.hooks import compiled
from gradexporter.hooks.layers import Layer, without_data_parallel
from gradexporter.hooks.points import Witness
from gradexporter.records import Values

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture

PATIENCE = 2
"""Steps with gradients and without a sign of the hooks after which they are taken to be passed over."""

_log = logging.getLogger("gradexporter")


class LateHooks:
    """Watches over every part of a model that may have been compiled before its hooks were set."""

    def __init__(self, capture: Capture, model: nn.Module, place: torch.device, *, hidden: bool) -> None:
        """Sets a hook on each such part; none where nothing has been compiled yet.

        ``hidden`` is whether the layers were kept from code that was compiled before.
        """
        self._handles: list[Any] = []
        self._parts: list[_Part] = []
        self._warned = False
        if compiled.there():
            # The model itself too: a function of the user's that calls it may have been compiled.
            roots = {id(root): root for root in [*compiled.regions(model), _innermost(model)]}
            # Of a compiled model dynamo calls the hooks, and only then the code that it has made of the forward.
            self._parts = [
                _Part(root, Witness(capture, place, outside_counts=hidden or not compiled.has_code(root)))
                for root in roots.values()
            ]
            self._handles = [part.root.register_forward_pre_hook(part.witness) for part in self._parts]
        self.arrange(capture.layers)

    @property
    def settled(self) -> bool:
        """Whether every part has shown that it calls hooks."""
        return not self._parts

    def arrange(self, layers: Sequence[Layer]) -> None:
        """Takes the layers as they are now."""
        self._layers = layers
        for part in self._parts:
            inside = {id(module) for module in part.root.modules()}
            part.layers = {index for index, layer in enumerate(layers) if id(layer.module) in inside}

    def passed_over(self, order: Values, indexes: Sequence[int], graded: Collection[int]) -> bool:
        """Whether hooks are passed over as of this step; the first time the log says what to do.

        ``order`` is that of the layers ``indexes``, and ``graded`` those whose parameters have gradients.
        """
        ran = {index for index, rank in zip(indexes, order.tolist(), strict=True) if rank >= 0}
        for part in list(self._parts):
            if part.witness.called or ran.intersection(part.layers):
                self._parts.remove(part)
            elif part.layers & set(graded):
                part.silent += 1
        late = [part for part in self._parts if part.silent >= PATIENCE]
        if late and not self._warned:
            self._warned = True
            self._warn(sorted(set().union(*(part.layers for part in late))))
        return bool(late)

    def _warn(self, late: Sequence[int]) -> None:
        _log.warning(
            "gradexporter: outputs of %d layers (%s%s) are not seen: they run in code that torch.compile made before "
            "watch(), and such code never calls a hook that came later. Call watch() before the first compiled step, "
            "or torch.compiler.reset() once after it, which compiles anew. Gradients, parameters and optimizer state "
            "are measured all the same.",
            len(late),
            ", ".join(self._layers[index].name for index in late[:3]),
            ", ..." if len(late) > 3 else "",
        )

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()


def _innermost(model: nn.Module) -> nn.Module:
    return without_data_parallel(getattr(model, "_orig_mod", model))


class _Part:
    """A module that was compiled, or that compiled code may have taken in."""

    __slots__ = ("layers", "root", "silent", "witness")

    def __init__(self, root: nn.Module, witness: Witness) -> None:
        self.root = root
        self.witness = witness
        self.layers: set[int] = set()
        self.silent = 0
