"""Optimizers that spread their work over ranks, and what of it can be seen on one.

Known by name and shape, so that no package is imported that the user does not have.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradexporter.readback import Number


class Partitioned(Optimizer):
    """Stands for an optimizer of DeepSpeed: it updates flat partitions, and the model's parameters follow.

    Holds those parameters that lie on this rank whole.
    """

    def __init__(self, wrapped: Any, model: nn.Module) -> None:
        # Not Optimizer.__init__: there is nothing here that steps.
        self.wrapped = wrapped
        self.state = {}  # type: ignore[assignment]
        self._whole = [one for one in model.parameters() if one.requires_grad and not hasattr(one, "ds_id")]
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._hooks = 0

    @property
    def name(self) -> str:
        """Name of the class that it stands for."""
        return type(self.wrapped).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer, with the parameters of the model in the first."""
        groups = self.wrapped.param_groups
        return [{**group, "params": [] if at else self._whole} for at, group in enumerate(groups)]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Calls ``hook`` before each update."""
        return self._register(self._optimizer_step_pre_hooks, hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Calls ``hook`` after each update, or after it was skipped."""
        return self._register(self._optimizer_step_post_hooks, hook)

    def _register(self, hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> _Handle:
        if not self._optimizer_step_pre_hooks and not self._optimizer_step_post_hooks:
            self._listen()
        self._hooks += 1
        hooks[self._hooks] = hook
        return _Handle(self, hooks, self._hooks)

    def _listen(self) -> None:
        original = self.wrapped.step
        self._found = vars(self.wrapped).get("step")
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks

        def step(*args: Any, **kwargs: Any) -> Any:
            for hook in list(before.values()):
                hook(self, args, kwargs)
            result = original(*args, **kwargs)
            for hook in list(after.values()):
                hook(self, args, kwargs)
            return result

        self._step = step
        self.wrapped.step = step

    def _unlisten(self) -> None:
        if vars(self.wrapped).get("step") is self._step:  # else somebody wrapped ours, which now only passes on
            del self.wrapped.step
            if self._found is not None:
                self.wrapped.step = self._found

    def numbers(self) -> dict[str, Number]:
        """What it says of the last update: norm of the gradient over all ranks, loss scale, whether it was skipped."""
        overflow = getattr(self.wrapped, "overflow", False)
        found: dict[str, Number] = {"found_inf": _copied(overflow)}
        norm = getattr(self.wrapped, "_global_grad_norm", None)
        if isinstance(norm, Tensor):  # -1 is its word for a norm that is not finite
            norm = norm.detach().double().reshape(())
            found["gradient_norm"] = torch.where(norm < 0, torch.full_like(norm, math.nan), norm)
        elif norm is not None:
            found["gradient_norm"] = math.nan if norm < 0 else float(norm)
        scale = getattr(self.wrapped, "loss_scale", None)
        if isinstance(scale, (int, float)) and scale != 1:
            found["loss_scale"] = float(scale)
        return found


def _copied(overflow: Any) -> Number:
    return overflow.detach().clone().reshape(()) if isinstance(overflow, Tensor) else float(bool(overflow))


class _Handle:
    def __init__(self, owner: Partitioned, hooks: dict[int, Callable[..., Any]], key: int) -> None:
        self._owner, self._hooks, self._key = owner, hooks, key

    def remove(self) -> None:
        """Takes the hook off, and with the last one everything of ours."""
        self._hooks.pop(self._key, None)
        if not self._owner._optimizer_step_pre_hooks and not self._owner._optimizer_step_post_hooks:
            self._owner._unlisten()


def partitioned(model: nn.Module, optimizer: Any) -> Partitioned | None:
    """What is watched for an optimizer of DeepSpeed, or for the one that its engine wrapped; None for any other."""
    whole = getattr(model, "optimizer", None) if _is("DeepSpeedEngine", model) else None
    if whole is not None and optimizer is not whole and optimizer is getattr(whole, "optimizer", None):
        optimizer = whole  # updates partitions by now, which are none of the model's parameters
    if isinstance(optimizer, Optimizer) or not (
        _is("DeepSpeedOptimizer", optimizer) or _is("ZeROOptimizer", optimizer)
    ):
        return None
    return Partitioned(optimizer, model)


def refusal(optimizer: Any) -> str | None:
    """Why the updates of an optimizer cannot be seen at all."""
    if _is("ZeroRedundancyOptimizer", optimizer) and getattr(optimizer, "_overlap_with_ddp", False):
        return "it updates inside the backward, where no step is seen: build it with overlap_with_ddp=False"
    return None


def absent(optimizer: Any) -> str | None:
    """What an optimizer that spreads its work over ranks does not let be measured, and why."""
    if isinstance(optimizer, Partitioned):
        return (
            f"under {optimizer.name} gradients and parameters lie in flat partitions: gradients of layers, update "
            "ratios, optimizer state and parameters that are partitioned too are absent; the gradient norm is the one "
            "that it computes"
        )
    if _is("ZeroRedundancyOptimizer", optimizer):
        return (
            f"under {type(optimizer).__name__} each rank keeps the state of its own share of the parameters: update "
            "ratios are absent, and magnitudes of optimizer state are those of this share"
        )
    return None


def _is(name: str, value: Any) -> bool:
    return any(cls.__name__ == name for cls in type(value).__mro__)
