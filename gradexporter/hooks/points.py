"""The callables that torch holds for us. A copy of a watched model carries inert ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradexporter.hooks import compiled, within

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture
    from gradexporter.hooks.watched import Watched


_INERT = nullcontext().__exit__
"""Takes anything and returns None: a hook that does nothing, and that a model saved while it was watched brings
back where gradexporter is not installed."""


class Point:
    """A hook that does not travel: a copied or unpickled model has ``_INERT`` in its place."""

    __slots__ = ("__weakref__", "capture")

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (nullcontext(), "__exit__"))


class Entering(Point):
    """Before the forward of the watched model."""

    __slots__ = ("arrival", "inputs", "mark")

    def __init__(self, capture: Capture, place: torch.device) -> None:
        """``place`` is where the model computes."""
        super().__init__(capture)
        self.mark = compiled.mark(self, place)
        self.arrival = _Input(capture)
        self.inputs = compiled.mark(self.arrival, place) if place.type == "cpu" else None

    @compiled.untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            compiled.announce(self.mark)
            compiled.trace_each(self.inputs, (*args, *kwargs.values()))
        else:
            self.capture.entering(module, args, kwargs)

    def arrived(self, output: Tensor) -> None:
        """The forward has begun in compiled code."""
        within.entering(self.capture)

    def launched(self, recording: bool) -> bool | None:
        """The same on an accelerator; nothing to measure."""
        if not recording:
            within.entering(self.capture)
        return None


class _Input:
    """What the watched model is given in compiled code."""

    __slots__ = ("__weakref__", "capture")

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def arrived(self, output: Tensor) -> None:
        """One tensor that the model was given."""
        within.given(self.capture, output)


class Witness(Point):
    """Notes that the forward of its module has called hooks."""

    __slots__ = ("_outside_counts", "called", "mark")

    def __init__(self, capture: Capture, place: torch.device, *, outside_counts: bool) -> None:
        """``outside_counts``: also when it was called outside of compiled code."""
        super().__init__(capture)
        self.called = False
        self._outside_counts = outside_counts
        self.mark = compiled.mark(self, place)

    @compiled.untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            compiled.announce(self.mark)
        elif self._outside_counts:
            self.called = True

    def arrived(self, output: Tensor) -> None:
        """The same in compiled code."""
        self.called = True

    def launched(self, recording: bool) -> bool | None:
        """The same on an accelerator; nothing to measure."""
        self.called = True
        return None


class Leaving(Point):
    """After the forward of the watched model, also when it raised."""

    __slots__ = ()

    @compiled.untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.capture.leaving()


class LayerOutput(Point):
    """After the forward of one layer."""

    __slots__ = ("kept", "layer", "mark")

    def __init__(self, capture: Capture, layer: int, place: torch.device, *, kept: bool) -> None:
        """``place`` is where the layer computes, ``kept`` as ``compiled.keeps_output`` says."""
        super().__init__(capture)
        self.kept = kept
        self.layer = layer  # never read while dynamo traces: it may change, and layers may share compiled code
        self.mark = compiled.mark(self, place)

    @compiled.untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if self.kept or not compiled.fuses():
                compiled.trace(self.mark, output)
        else:
            self.capture.layer_output(self.layer, output)

    def arrived(self, output: Tensor) -> None:
        """The layer has returned ``output`` in compiled code."""
        within.returned(self.capture, self.layer, output)

    def launched(self, recording: bool) -> bool | None:
        """An output is about to be measured on an accelerator: whether in full; None for not at all."""
        return True if recording else within.launched(self.capture, self.layer)


class Updating:
    """Before ``optimizer.step()``; keeps nothing of ours alive, for an optimizer may outlive its model."""

    __slots__ = ("__weakref__", "_capture", "_index", "_optimizer", "mark")

    def __init__(self, capture: Capture, index: int, optimizer: Any) -> None:
        """``index`` is the place of what is updated among the optimizers of ``capture``."""
        self._capture = weakref.ref(capture)
        self._index = index
        self._optimizer = weakref.ref(optimizer)
        self.mark = compiled.mark(self, torch.device("cpu"))

    @compiled.untraced
    def __call__(self, optimizer: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            compiled.announce(self.mark)
            return
        capture = self._capture()
        if capture is not None:
            capture.step_begins(self._index, optimizer, bool(kwargs.get("closure") or len(args) > 1))

    def arrived(self, output: Tensor) -> None:
        """A compiled ``step`` is about to change the parameters."""
        capture, optimizer = self._capture(), self._optimizer()
        if capture is not None and optimizer is not None:
            capture.step_begins(self._index, optimizer, False)


class Updated(Updating):
    """After ``optimizer.step()``."""

    __slots__ = ()

    @compiled.untraced
    def __call__(self, optimizer: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            compiled.announce(self.mark)
            return
        capture = self._capture()
        if capture is not None:
            capture.step_ended(self._index, optimizer)

    def arrived(self, output: Tensor) -> None:
        """A compiled ``step`` has changed them."""
        capture, optimizer = self._capture(), self._optimizer()
        if capture is not None and optimizer is not None:
            within.step_ends(capture, self._index, optimizer)


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

    @compiled.untraced
    def __call__(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return  # compiled autograd; the update measures for itself
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

    @compiled.untraced
    def _first(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._second)

    @compiled.untraced
    def _second(self) -> None:
        capture, watched = self._capture(), self._watched()
        if capture is not None and watched is not None:
            capture.backward_ended(watched)
