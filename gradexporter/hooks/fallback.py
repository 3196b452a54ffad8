"""What dynamo cannot compile runs as eagerly as if nobody watched it.

Where dynamo gives up a function, the modules of ``torch.nn`` that it calls run eagerly, but for those with hooks: their
``forward`` is compiled one by one, with the rounding of the backend. A module whose hooks are all ours has none for it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from gradexporter.hooks import points

_MODULE, _NAME = "torch._dynamo.utils", "nnmodule_has_hooks"

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

_users: weakref.WeakSet[EagerParts] = weakref.WeakSet()
_lock = threading.Lock()


class EagerParts:
    """One who watches; while there is any, dynamo does not see our hooks where it asks for them."""

    def __init__(self) -> None:
        self._waiting = False

    def attach(self) -> None:
        """Takes effect once dynamo is there, which ``look`` notices."""
        self._waiting = True
        self.look()

    def look(self) -> None:
        """Before a forward: somebody may have called ``torch.compile`` since."""
        if self._waiting and _MODULE in sys.modules:
            self._waiting = False
            with _lock:
                _users.add(self)
                asked = getattr(sys.modules[_MODULE], _NAME, None)
                if asked is not None and not hasattr(asked, "_gradexporter"):
                    setattr(sys.modules[_MODULE], _NAME, _passing_over_ours(asked))

    def detach(self) -> None:
        """Undoes ``attach``; a second call does nothing."""
        self._waiting = False
        with _lock:
            _users.discard(self)
            before = getattr(getattr(sys.modules.get(_MODULE), _NAME, None), "_gradexporter", None)
            if not len(_users) and before is not None:
                setattr(sys.modules[_MODULE], _NAME, before)


def _passing_over_ours(asked: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(asked)
    def has_hooks(mod: nn.Module, *args: Any, **kwargs: Any) -> bool:
        hooks = [hook for name in _HOOKS for hook in vars(mod).get(name, {}).values()]
        if hooks and all(isinstance(hook, points.Point) for hook in hooks) and not vars(mod).get("_backward_hooks"):
            return False
        return asked(mod, *args, **kwargs)

    has_hooks._gradexporter = asked  # type: ignore[attr-defined]
    return has_hooks
