"""Reductions of tensors in main memory, where looking at a result costs nothing.

Chosen by measurement on x86: ``vector_norm`` and ``aminmax`` read 35 GB/s, ``sum`` 75; the infinity norm and
``isfinite`` 1.5 to 2, so elements are counted only after a cheaper result says that one is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradexporter.records import Values

_SMALLEST_SQUARE_SAFE = 1e-18
"""Below it squares of float32 elements underflow, so the norm is taken again in float64."""

_HALF = (torch.float16, torch.bfloat16)


def measure(tensors: Sequence[Tensor]) -> Values:
    """L2 norm, largest absolute value, non-finite count of each tensor: float64, shape ``(3, len(tensors))``."""
    listed = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in tensors]
    norms = _gathered(torch._foreach_norm(listed, 2))
    lows, highs = zip(*[torch.aminmax(tensor) for tensor in listed], strict=True)
    largest = np.maximum(np.abs(_gathered(lows)), np.abs(_gathered(highs)))
    block = np.stack([norms, largest, np.zeros(len(listed))])
    odd = ~np.isfinite(norms) | ((norms < _SMALLEST_SQUARE_SAFE) & (largest > 0))
    for index in np.flatnonzero(odd):
        tensor = listed[index]
        if np.isfinite(largest[index]):
            block[0, index] = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
        else:
            block[2, index] = count_nonfinite(tensor)
    return block


def _gathered(scalars: Sequence[Tensor]) -> Values:
    first = scalars[0].dtype
    if any(scalar.dtype is not first for scalar in scalars):
        scalars = [scalar.double() for scalar in scalars]
    return torch.stack(tuple(scalars)).double().numpy()


def count_nonfinite(tensor: Tensor) -> int:
    """Number of NaN and infinite elements."""
    return tensor.numel() - int(torch.isfinite(tensor).sum().item())


def nonfinite(tensor: Tensor) -> int:
    """Number of non-finite elements, from one sum as long as there are none."""
    total = tensor.sum(dtype=torch.float32) if tensor.dtype in _HALF else tensor.sum()
    return 0 if math.isfinite(total.item()) else count_nonfinite(tensor)


class Accumulator:
    """Output statistics of all layers over the calls of one step; shape ``(5, layers)`` in float64.

    Rows: sum of squares, largest absolute value, zeros, elements, non-finite elements. Rows 0 to 2 cover
    the calls that were measured in full, row 3 counts their elements.
    """

    def __init__(self, layers: int) -> None:
        self._block = np.zeros((5, layers))

    def add(self, layer: int, tensor: Tensor, *, full: bool) -> None:
        """Adds one output tensor; a plain sentinel when not ``full``."""
        block = self._block
        if not full:
            block[4, layer] += nonfinite(tensor)
            return
        if tensor.dtype in _HALF:
            tensor = tensor.float()
        ends = torch.aminmax(tensor)
        low, high = ends.min.item(), ends.max.item()
        largest = max(abs(low), abs(high)) if low == low else math.nan  # a NaN goes through to both ends
        finite = math.isfinite(largest)
        norm = torch.linalg.vector_norm(tensor).item()
        if finite and (math.isinf(norm) or norm < _SMALLEST_SQUARE_SAFE):
            norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
        block[0, layer] += norm * norm
        block[1, layer] = np.maximum(block[1, layer], largest)
        block[2, layer] += tensor.numel() - int(torch.count_nonzero(tensor).item())
        block[3, layer] += tensor.numel()
        if not finite:
            block[4, layer] += count_nonfinite(tensor)

    def take(self, layers: Sequence[int]) -> Values:
        """The columns of these layers, which start again from zero."""
        index = list(layers)
        block = self._block[:, index]
        self._block[:, index] = 0.0
        return block
