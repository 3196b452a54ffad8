"""What a gradient scaler does to a step: the scale, and the update that it skips.

The optimizer's own hooks do not fire on a skipped update, so ``GradScaler.step`` is wrapped while anything is
watched. One wrapper serves every scaler of the process, those included that nobody told us of.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


class ScalerListener(Protocol):
    """Hears of every ``scaler.step(optimizer)``; must not raise."""

    def scaler_steps(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Before the scaler looks at the gradients."""

    def scaler_stepped(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """After the update was applied or skipped, before the scale changes."""


_listeners: weakref.WeakSet[ScalerListener] = weakref.WeakSet()
_lock = threading.Lock()
_original: Callable[..., Any] | None = None


def listen(listener: ScalerListener) -> None:
    """Tells ``listener`` of scalers until ``unlisten``."""
    global _original
    with _lock:
        _listeners.add(listener)
        if not getattr(GradScaler.step, "_gradexporter", False):  # anew if somebody else took it off
            _original = GradScaler.step
            GradScaler.step = _wrapped(_original)  # type: ignore[method-assign]


def unlisten(listener: ScalerListener) -> None:
    """Undoes ``listen``; with the last listener the wrapper goes, unless somebody wrapped it in turn."""
    global _original
    with _lock:
        _listeners.discard(listener)
        if not len(_listeners) and _original is not None and getattr(GradScaler.step, "_gradexporter", False):
            GradScaler.step = _original  # type: ignore[method-assign]
            _original = None


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        listeners = list(_listeners) if self.is_enabled() else []
        for listener in listeners:
            listener.scaler_steps(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.scaler_stepped(self, optimizer)
        return result

    step._gradexporter = True  # type: ignore[attr-defined]
    return step


def scale_of(scaler: GradScaler | None) -> Tensor | None:
    """A copy of the scale as a tensor on its device, or None before the first ``scale`` and when disabled."""
    scale = getattr(scaler, "_scale", None) if scaler is not None and scaler.is_enabled() else None
    return scale.detach().clone() if isinstance(scale, Tensor) else None
