"""The callables that torch holds for us. A copy of a watched model carries inert ones."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture
    from gradexporter.hooks.watched import Watched


_INERT = nullcontext().__exit__
"""Takes anything and returns None: a hook that does nothing, and that a model saved while it was watched brings
back where gradexporter is not installed."""


class Point:
    """A hook that does not travel: a copied or unpickled model has ``_INERT`` in its place."""

    __slots__ = ("capture",)

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (nullcontext(), "__exit__"))


class Entering(Point):
    """Before the forward of the watched model."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.capture.entering(module, args, kwargs)


class Leaving(Point):
    """After the forward of the watched model, also when it raised."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.capture.leaving()


class LayerOutput(Point):
    """After the forward of one layer."""

    __slots__ = ("layer",)

    def __init__(self, capture: Capture, layer: int) -> None:
        super().__init__(capture)
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.capture.layer_output(self.layer, output)


class Accumulated:
    """After autograd added to the gradient of a parameter; asks once a backward to be called at its end.

    The engine runs queued callbacks in order, and data parallel wrappers queue theirs during backward: a
    callback that queues a second one runs after them, when gradients are reduced.
    """

    __slots__ = ("_capture", "_task", "_watched", "one_by_one")

    def __init__(self, capture: Capture, watched: Watched) -> None:
        # Weak: the autograd engine holds this hook where the garbage collector cannot see it, and a strong
        # reference back to the model would keep its parameters for ever.
        self._capture = weakref.ref(capture)
        self._watched = weakref.ref(watched)
        self._task = -1
        self.one_by_one = False
        """Whether each gradient is measured here: at the end of the backward it is gone."""

    def __call__(self, parameter: Tensor) -> None:
        # Keyed by the graph task: a backward that fails midway never reaches its end, and must not
        # leave a flag behind that blinds the next one.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.began(parameter)
        if self.one_by_one:
            capture, watched = self._capture(), self._watched()
            if capture is not None and watched is not None:
                capture.gradient_ready(watched, parameter)

    def began(self, parameter: Tensor) -> None:
        """A backward began, with this parameter."""
        capture, watched = self._capture(), self._watched()
        if capture is not None and watched is not None:
            capture.backward_began(watched, parameter)
            torch.autograd.Variable._execution_engine.queue_callback(self._first)

    def _first(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._second)

    def _second(self) -> None:
        capture, watched = self._capture(), self._watched()
        if capture is not None and watched is not None:
            capture.backward_ended(watched)
