"""How the elements of a tensor lie in its memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def gapless(tensor: Tensor) -> bool:
    """Whether the elements fill their memory once, in whatever order."""
    return tensor.is_contiguous() or _gapless(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=4096)
def _gapless(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
