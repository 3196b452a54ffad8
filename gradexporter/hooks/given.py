"""What a user hands to ``watch``: checked before a hook is set, and refused in words that say what to do."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import UninitializedParameter

from gradexporter.config import ConfigError
from gradexporter.hooks.optimizers import groups_of, resolved
from gradexporter.hooks.partitions import Partitioned, refusal
from gradexporter.hooks.shares import optimized_by


class Stepping(Protocol):
    """What updates parameters: an optimizer of torch, a wrapper around one, or another object with ``step()``."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Applies one update."""


def checked(model: Any, optimizer: Any, scaler: Any) -> list[Stepping]:
    """The optimizers that a user passed, as a list; raises ConfigError for what cannot be watched."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, "
            "not its parameters or its output"
        )
    given = [] if optimizer is None else [optimizer]
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else given
    if optimizer is not None and not optimizers:
        raise ConfigError("optimizer cannot be an empty sequence: pass the optimizers that update the model")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"model cannot be a {type(model).__name__}: TorchScript takes no hooks; watch the Python module instead"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError(
            "model has parameters that are not initialised yet (lazy modules): run one forward with a sample "
            "batch first"
        )
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ConfigError("optimizer holds the same object twice: pass each optimizer once")
    own = optimized_by(model)
    for one in optimizers:
        if not callable(getattr(one, "step", None)) or isinstance(one, (type, nn.Module)):
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer or another object with step(), or a sequence of them, got "
                f"{what}: pass the object whose step() updates the model, or none if you change its parameters by hand"
            )
        inside = resolved(model, [one])
        groups = [group for inner in inside for group in groups_of(inner)]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if not isinstance(inside[0], Partitioned) and not held & own:
            raise ConfigError(
                f"the optimizer ({type(one).__name__}) holds none of the model's parameters: pass the optimizer "
                "that was built from this model, after the last .to() or wrap that replaces parameters; under "
                "DeepSpeed pass the engine and engine.optimizer"
            )
        reason = refusal(one)
        if reason is not None:
            raise ConfigError(f"the optimizer ({type(one).__name__}) cannot be watched: {reason}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ConfigError(
            f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}: pass the scaler whose "
            "step() wraps the optimizer's"
        )
    return optimizers
