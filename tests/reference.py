"""Gradients by plain autograd in float64, on a copy that nobody watches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


def gradients(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> list[Tensor]:
    """The gradients that a loss gives the parameters of a model; those that it gives none are left out."""
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    loss_of(twin).backward()
    return [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]


def norm(tensors: Iterable[Tensor]) -> float:
    """L2 norm of all tensors together, sparse and complex ones too."""
    return math.sqrt(sum(dense(tensor).abs().square().sum().item() for tensor in tensors))


def dense(tensor: Tensor) -> Tensor:
    """The tensor in double precision, without graph and with every element."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor if tensor.is_complex() else tensor.double()
