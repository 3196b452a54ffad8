"""``clip_grad_norm_``: torch's, bit for bit, and the norms that it computes are kept for whoever watches.

Clipping reads every gradient once for its norm and keeps only the norm of norms. Measured here, the norms of all
layers cost nothing beyond it. Where gradients are on an accelerator it is torch's own: nothing may wait for the
device there, and the pass at the end of backward stays.
"""

from __future__ import annotations

import math
import operator
import types
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gradexporter.hooks import clipping
from gradexporter.hooks.batch import valueless

_KEPT = ({torch.float32}, {torch.float64})
"""Dtypes whose norms are worth keeping: one in half precision is rounded and overflows at 65504. Of mixed dtypes
torch adds up the norms in an order of its own."""

_SAMPLES = 8
"""Gradients, the smallest, that ours is tried on beside torch's."""

NoneType = type(None)

_gradient = operator.attrgetter("grad")
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")
_layout = operator.attrgetter("layout")
_requires_grad = operator.attrgetter("requires_grad")

_agrees: dict[bool, bool] = {}
"""Whether our operations give what torch's clip gives, with foreach and without; tried at the first clip."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips like ``torch.nn.utils.clip_grad_norm_``: same arguments, same gradients, same result, bit for bit.

    A monitor that watches these parameters takes the norm of each from here, before anything is scaled, and makes
    no pass of its own at the end of backward from the second update on.
    """
    if torch.compiler.is_compiling():
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    held = _listed(parameters)
    if clipping.heard() and not valueless():
        total = _clipped(held, max_norm, norm_type, foreach)
        if total is not None:
            return total
    return torch.nn.utils.clip_grad_norm_(held, max_norm, norm_type, error_if_nonfinite, foreach)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    held = list(parameters)
    if not held and isinstance(parameters, types.GeneratorType):
        # As torch does it, which cannot see any more that it was a generator.
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    return held


def _clipped(held: list[Tensor], max_norm: float, norm_type: float, foreach: bool | None) -> Tensor | None:
    """Tells listeners that a clip begins, and does it if it is one whose norms are worth keeping; else None."""
    try:
        gradients = list(map(_gradient, held))
        kinds = set(map(type, gradients))
        if NoneType in kinds:
            held = [parameter for parameter, gradient in zip(held, gradients, strict=True) if gradient is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
            kinds.discard(NoneType)
        total = None
        if kinds == {Tensor} and norm_type == 2 and _worth_keeping(gradients):
            alike = foreach is None or bool(foreach)
            if alike not in _agrees:
                _agrees[alike] = _tried(gradients, foreach)
            if _agrees[alike]:
                norms, total = _norms(gradients, alike)
    except Exception:  # what cannot be clipped is torch's to refuse
        return None
    if total is None or not math.isfinite(total.item()):
        clipping.begins(held, None)
        return None
    clipping.begins(held, np.asarray(norms.numpy(), dtype=np.float64))
    _scale(gradients, max_norm, total, alike)
    return total


def _worth_keeping(gradients: list[Tensor]) -> bool:
    return (
        set(map(_dtype, gradients)) in _KEPT
        and set(map(_device, gradients)) == {torch.device("cpu")}
        and set(map(_layout, gradients)) == {torch.strided}
        and True not in map(_requires_grad, gradients)
    )


def _norms(gradients: list[Tensor], alike: bool) -> tuple[Tensor, Tensor]:
    """Norm of each gradient and of all, by the operations of torch's clip."""
    norms = torch._foreach_norm(gradients, 2.0) if alike else [torch.linalg.vector_norm(g, 2.0) for g in gradients]
    each = torch.stack(tuple(norms))
    return each, torch.linalg.vector_norm(each, 2.0)


def _scale(gradients: list[Tensor], max_norm: float, total: Tensor, alike: bool) -> None:
    coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if alike:
        torch._foreach_mul_(gradients, coefficient)
    else:
        for gradient in gradients:
            gradient.mul_(coefficient)


def _tried(gradients: list[Tensor], foreach: bool | None) -> bool:
    """Whether ours and torch's do the same, bit for bit, to tensors like some of the gradients."""
    alike = foreach is None or bool(foreach)
    samples = sorted(gradients, key=Tensor.numel)[:_SAMPLES]
    ours = [torch.full_like(sample, 1 / 3) for sample in samples]
    theirs = [gradient.clone() for gradient in ours]
    held = [torch.nn.Parameter(torch.empty_like(sample)) for sample in samples]
    for parameter, gradient in zip(held, theirs, strict=True):
        parameter.grad = gradient
    total = _norms(ours, alike)[1]
    _scale(ours, 0.1, total, alike)
    expected = torch.nn.utils.clip_grad_norm_(held, 0.1, 2.0, False, foreach)
    return torch.equal(total, expected) and all(map(torch.equal, ours, theirs))
