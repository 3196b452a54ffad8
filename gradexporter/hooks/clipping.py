"""Who hears of a clip of ours: it has computed the norm of every gradient, and throws nothing away."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradexporter.records import Values


class ClipListener(Protocol):
    """Hears of every ``gradexporter.clip_grad_norm_`` before it scales; must not raise."""

    def clip_begins(self, parameters: Sequence[Tensor], norms: Values | None) -> None:
        """``parameters`` all have a gradient; ``norms`` are its finite L2 norms in float64, or None if not known."""


_listeners: tuple[weakref.ref[ClipListener], ...] = ()


def listen(listener: ClipListener) -> None:
    """Tells ``listener`` of clips until ``unlisten``, or for as long as it lives."""
    global _listeners
    unlisten(listener)
    _listeners = (*_listeners, weakref.ref(listener))


def unlisten(listener: ClipListener) -> None:
    """Undoes ``listen``."""
    global _listeners
    _listeners = tuple(one for one in _listeners if one() not in (None, listener))


def heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners)


def begins(parameters: Sequence[Tensor], norms: Values | None) -> None:
    """Tells every listener."""
    for one in _listeners:
        listener = one()
        if listener is not None:
            listener.clip_begins(parameters, norms)
