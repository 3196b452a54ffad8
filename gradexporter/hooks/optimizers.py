"""What updates the parameters: optimizers of torch, wrappers around them, other objects, the user's own code.

An optimizer of torch announces its steps by its hooks. Everything else is seen by what it leaves behind: parameters
that are not what they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradexporter.hooks.partitions import Partitioned, partitioned
from gradexporter.readback import Number

_PASSING_ON = ("Accelerated", "Lightning")
"""Beginnings of the names of wrappers that add nothing to the update of what they wrap."""

_MOST_NESTED = 4
"""Wrappers within wrappers that are looked through."""

MOST_RATES = 16
"""Learning rates that are kept of optimizers that make one update together."""

_STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__
"""What runs while an optimizer of torch is in a step: its hooks, then the step."""


class ByHand:
    """Stands where no optimizer of torch is: the model's parameters, and what ``target`` knows of them."""

    def __init__(self, model: nn.Module, target: Any = None, leave: Sequence[Tensor] = ()) -> None:
        """``target`` is what the user passed as optimizer; ``leave`` are parameters that others update."""
        self._model = model
        self._target = target
        self._leave = {id(parameter) for parameter in leave}
        self._once_trained: set[int] = set()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The target's own groups, or one of all that the model has trained and nobody else updates."""
        groups = groups_of(self._target)
        if groups:
            return groups
        parameters = [p for p in self._model.parameters() if id(p) not in self._leave]
        trained = {id(p) for p in parameters if p.requires_grad}
        self._once_trained = (self._once_trained & {id(p) for p in parameters}) | trained
        return [{"params": [p for p in parameters if id(p) in self._once_trained]}]

    def stands_for(self, optimizer: Any) -> bool:
        """Whether it is what the user passed as ``optimizer``."""
        return optimizer is not None and self._target is optimizer

    @property
    def state(self) -> Mapping[Any, Any]:
        """The target's own state if it has any like torch's."""
        state = getattr(self._target, "state", None)
        return state if isinstance(state, Mapping) else {}


class Together:
    """Optimizers that make one update together, as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Their groups one after another."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Together:
        """Their state; ``get`` looks in all of them."""
        return self

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """What any of them keeps for a parameter."""
        kept: dict[str, Any] = {}
        for optimizer in self.optimizers:
            state = getattr(optimizer, "state", None)
            if isinstance(state, Mapping):
                kept.update(state.get(parameter) or {})
        return kept or default


class Steps:
    """The steps of one optimizer, or of a wrapper and what it wraps, that are running: the outermost is the update."""

    def __init__(self) -> None:
        self._running: list[int] = []

    def begin(self, optimizer: Any) -> bool:
        """Whether this step is the outermost."""
        if self._running:  # left over by one that raised, unless it is still on the stack
            del self._running[max(0, _steps_on_stack() - 1) :]
        self._running.append(id(optimizer))
        return len(self._running) == 1

    def end(self, optimizer: Any) -> bool:
        """Whether the outermost step ended."""
        if id(optimizer) not in self._running:
            return False
        while self._running.pop() != id(optimizer):
            pass
        return not self._running


def _steps_on_stack() -> int:
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return count


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Parameter groups as torch has them; empty when an object has none like that."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, (list, tuple)):
        return []
    good = (isinstance(g, dict) and all(isinstance(p, Tensor) for p in g.get("params", (None,))) for g in groups)
    return list(groups) if all(good) else []


def announces(optimizer: Any) -> bool:
    """Whether an object calls step hooks: an Optimizer that was initialised as one."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def announcers(optimizer: Any) -> list[Any]:
    """The optimizers of torch that tell of the steps of ``optimizer``: itself if it does, and what it wraps."""
    if isinstance(optimizer, Together):
        return [inner for one in optimizer.optimizers for inner in announcers(one)]
    if isinstance(optimizer, Partitioned):
        return [optimizer]  # what is inside steps once a partition
    found: dict[int, Any] = {}
    _collect(optimizer, found, set(), _MOST_NESTED)
    return list(found.values())


def _collect(optimizer: Any, found: dict[int, Any], seen: set[int], depth: int) -> None:
    if id(optimizer) in seen or depth == 0:
        return
    seen.add(id(optimizer))
    if announces(optimizer):
        found[id(optimizer)] = optimizer
    for inner in _inside(optimizer):
        _collect(inner, found, seen, depth - 1)


def _inside(optimizer: Any) -> Iterator[Any]:
    """Optimizers, and other things with a step, that an object keeps in its attributes."""
    attributes = getattr(optimizer, "__dict__", None)
    for value in list(attributes.values()) if isinstance(attributes, dict) else []:
        for item in value if isinstance(value, (list, tuple)) else value.values() if type(value) is dict else [value]:
            if isinstance(item, Optimizer) or (groups_of(item) and callable(getattr(item, "step", None))):
                yield item


def resolved(model: nn.Module, given: Sequence[Any]) -> list[Any]:
    """What is watched for the objects that a user passed, or for none: each makes updates of its own.

    A wrapper that only passes on is what it wraps. One with an update of its own stays: its outermost step counts.
    """
    found: list[Any] = []
    silent: list[Any] = []
    for optimizer in given:
        stand_in = partitioned(model, optimizer)
        if stand_in is not None:
            found.append(stand_in)
            continue
        inner = announcers(optimizer)
        own = isinstance(optimizer, Optimizer) and not type(optimizer).__name__.startswith(_PASSING_ON)
        if not inner:
            silent.append(optimizer)
        elif announces(optimizer) or (own and groups_of(optimizer)):
            found.append(optimizer)
        else:
            found += inner
    found += [ByHand(model, optimizer) for optimizer in silent if groups_of(optimizer)]
    unknown = [optimizer for optimizer in silent if not groups_of(optimizer)]
    if unknown or not found:
        others = [p for optimizer in found for group in optimizer.param_groups for p in group["params"]]
        found.append(ByHand(model, unknown[0] if unknown else None, others))
    return found


def state_of(optimizer: Any) -> Any:
    """Where the state lies: the optimizer, together with those that it wraps."""
    inner = [one for one in announcers(optimizer) if one is not optimizer]
    return Together([optimizer, *inner]) if inner else optimizer


def rates_of(optimizer: Any) -> list[Number]:
    """Learning rate of each group that has one; of many optimizers that update together, each rate once."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if isinstance(optimizer, Together):  # one optimizer a parameter would be one series a parameter
        rates = list({id(rate) if isinstance(rate, Tensor) else rate: rate for rate in rates}.values())[:MOST_RATES]
    return [rate.detach().clone().reshape(()) if isinstance(rate, Tensor) else float(rate) for rate in rates]
