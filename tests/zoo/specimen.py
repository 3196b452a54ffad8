"""What one architecture of the zoo is, and the lists that the architectures are kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

Batch = Any


def of_output(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that a model of transformers computes from a batch with labels."""
    loss: Tensor = model(**batch).loss
    return loss


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One architecture at tiny size, from a seed and without a download."""

    name: str
    family: str
    model: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = of_output
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw

    def __str__(self) -> str:
        return self.name


def whole(generator: Generator, *shape: int, below: int, at_least: int = 0) -> Tensor:
    """Integers, for tokens and labels."""
    return torch.randint(at_least, below, shape, generator=generator)


def real(generator: Generator, *shape: int) -> Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(shape, generator=generator)
