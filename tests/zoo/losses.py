"""Batches and losses of the networks that are written with torch.nn alone."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.zoo.specimen import Batch, real, whole

CLASSES = 4


def pictures(generator: Generator) -> tuple[Tensor, Tensor]:
    return real(generator, 4, 3, 16, 16), whole(generator, 4, below=CLASSES)


def grey(generator: Generator) -> Tensor:
    return torch.rand((4, 1, 16, 16), generator=generator)


def rows(generator: Generator) -> tuple[Tensor, Tensor]:
    return real(generator, 8, 6), whole(generator, 8, below=CLASSES)


def curves(generator: Generator) -> tuple[Tensor, Tensor]:
    x = real(generator, 8, 1)
    return x, torch.sin(3 * x)


def sentences(generator: Generator) -> tuple[Tensor, Tensor]:
    return whole(generator, 4, 8, below=32), whole(generator, 4, 8, below=32)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of logits whose last dimension is the classes."""
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def regressed(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return functional.mse_loss(model(x), y)


def own(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model returns."""
    loss: Tensor = model(*batch) if isinstance(batch, tuple) else model(batch)
    return loss


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
