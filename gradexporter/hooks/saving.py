"""A watched model is saved and copied as if nobody watched it.

A hook that travels with a saved model is a callable that the reader has to know, and that ``torch.load`` refuses as
it refuses any callable that was not declared safe.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

from gradexporter.hooks import points

_KEY = "__getstate__"

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

_COPYING = ("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__")
"""What a class may have that takes its state by another way; its copies carry hooks that do nothing."""


class CleanState:
    """What pickle and copy ask modules for their state, which leaves out our hooks."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """From now on these modules are saved without our hooks."""
        for module in modules:
            if _KEY not in vars(module) and _ordinary(type(module)):
                vars(module)[_KEY] = _State(module)
                self._modules.append(weakref.ref(module))

    def detach(self) -> None:
        """Undoes ``attach``; a second call does nothing."""
        while self._modules:
            module = self._modules.pop()()
            if module is not None and isinstance(vars(module).get(_KEY), _State):
                del vars(module)[_KEY]


class _State:
    """``__getstate__`` of one module: pickle and copy find it on the instance before that of the class."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError("this was the state of a module that is gone")
        of_class = getattr(type(module), _KEY, None)
        state = vars(module) if of_class is None else of_class(module)
        return _without_hooks(state) if isinstance(state, dict) else state

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # for whoever copies ``vars`` of a module themselves


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if not isinstance(value, _State)}
    ours = {key for name in _HOOKS for key, hook in (kept.get(name) or {}).items() if isinstance(hook, points.Point)}
    for name in (*_HOOKS, *_FLAGS):
        if ours.intersection(kept.get(name) or ()):
            kept[name] = OrderedDict((key, value) for key, value in kept[name].items() if key not in ours)
    if type(kept.get("_parameters")) is OrderedDict:  # for dynamo, see ``compiled.hidden``
        kept["_parameters"] = dict(kept["_parameters"])
    return kept


def _ordinary(kind: type[nn.Module]) -> bool:
    """Whether pickle and copy ask a module of this class for its state, and find all of it in ``vars``."""
    own = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in _COPYING)
    return not own and not any(vars(base).get("__slots__") for base in kind.__mro__)
