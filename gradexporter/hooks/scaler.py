"""What a gradient scaler does to a step: the scale, and the update that it skips.

The optimizer's own hooks do not fire on a skipped update, so ``GradScaler.step`` and ``GradScaler.unscale_`` are
wrapped while anything is watched. One wrapper serves every scaler of the process, those included that nobody told
us of, and those of a subclass.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

if TYPE_CHECKING:
    from gradexporter.hooks.watched import Watched


class ScalerListener(Protocol):
    """Hears of every ``unscale_`` and ``step`` of a scaler that is enabled; must not raise."""

    def scaler_unscales(self, scaling: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Before the scaler divides the gradients by its scale."""

    def scaler_steps(self, scaling: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Before the scaler looks at the gradients."""

    def scaler_stepped(self, scaling: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """After the update was applied or skipped, before the scale changes."""


_listeners: weakref.WeakSet[ScalerListener] = weakref.WeakSet()
_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}


def listen(listener: ScalerListener) -> None:
    """Tells ``listener`` of scalers until ``unlisten``."""
    with _lock:
        _listeners.add(listener)
        for name, wrapped in (("step", _wrapped_step), ("unscale_", _wrapped_unscale)):
            method = getattr(GradScaler, name)
            if not getattr(method, "_gradexporter", False):  # anew if somebody else took it off
                _originals[name] = method
                wrapper = wrapped(method)
                wrapper._gradexporter = True  # type: ignore[attr-defined]
                setattr(GradScaler, name, wrapper)


def unlisten(listener: ScalerListener) -> None:
    """Undoes ``listen``; with the last listener a wrapper goes, unless somebody wrapped it in turn."""
    with _lock:
        _listeners.discard(listener)
        for name, original in list(_originals.items()):
            if not len(_listeners) and getattr(getattr(GradScaler, name), "_gradexporter", False):
                setattr(GradScaler, name, original)
                del _originals[name]


def _wrapped_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        listeners = list(_listeners) if self.is_enabled() else []
        for listener in listeners:
            listener.scaler_steps(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.scaler_stepped(self, optimizer)
        return result

    return step


def _wrapped_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale_(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for listener in list(_listeners) if self.is_enabled() else []:
            listener.scaler_unscales(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    return unscale_


def scale_of(scaling: GradScaler | None) -> Tensor | None:
    """A copy of the scale as a tensor on its device, or None before the first ``scale`` and when disabled."""
    scale = getattr(scaling, "_scale", None) if scaling is not None and scaling.is_enabled() else None
    return scale.detach().clone() if isinstance(scale, Tensor) else None


class Scaling:
    """What is known of the scaler of a run; keeps it alive no longer than its owner does."""

    def __init__(self, scaling: GradScaler | None) -> None:
        """None where nobody has told of one yet."""
        self._scaling = None if scaling is None else weakref.ref(scaling)
        self._keys: dict[int, int] = {}
        """By optimizer of ours the identity of the one, perhaps a wrapper, that the scaler knows."""

    def heard(self, scaling: GradScaler, watched: Watched, optimizer: Any) -> None:
        """The scaler is at work on a watched optimizer."""
        self._keys[watched.index] = id(optimizer)
        if self._scaling is None or self._scaling() is not scaling:
            self._scaling = weakref.ref(scaling)

    def unscaled(self, watched: Watched) -> bool:
        """Whether the scaler has divided these gradients by its scale since its last update."""
        state = self._state(watched)
        return state is not None and state["stage"] is OptState.UNSCALED

    def scale(self) -> Tensor | None:
        """A copy of the scale that losses are multiplied by now; None where none is known."""
        return scale_of(None if self._scaling is None else self._scaling())

    def waits(self, watched: Watched) -> bool:
        """Whether a scaler that scales its losses has not touched these gradients since its last update."""
        scaling = None if self._scaling is None else self._scaling()
        its = not self._keys or watched.index in self._keys
        return its and scale_of(scaling) is not None and self._state(watched) is None

    def _state(self, watched: Watched) -> dict[str, Any] | None:
        scaling = None if self._scaling is None else self._scaling()
        states = getattr(scaling, "_per_optimizer_states", None)
        key = self._keys.get(watched.index, id(watched.optimizer))
        # Not by the bracket: the scaler makes an entry for whatever is looked up.
        state: dict[str, Any] | None = None if states is None else states.get(key)
        return state
