"""Which tensors of what a loop hands around have values that can be measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gradexporter import stats

MOST_PARTS = 1024
"""Losses and ranges that one step keeps, and parts of a batch that are looked at."""

_VALUELESS = frozenset({"FakeTensor", "FunctionalTensor"})
"""Tensor classes that stand for a tensor and hold no value."""


def valueless() -> bool:
    """Whether tensors have no value of their own yet: under vmap, grad and other transforms, and under a tracer."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def floating(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a nested structure of lists, tuples, dicts and dataclasses.

    Looks at no more than ``MOST_PARTS`` parts, and at nothing that would have to be computed to be seen.
    """
    waiting = [value]
    looked = 0
    while waiting and looked < MOST_PARTS:
        value = waiting.pop(0)
        looked += 1
        if isinstance(value, Tensor):
            valued = not (value.is_meta or value.is_nested) and type(value).__name__ not in _VALUELESS
            if valued and (value.dtype in stats.FLOATING or value.is_complex()):
                yield value
        elif isinstance(value, (list, tuple)):
            waiting += value[:MOST_PARTS]
        elif isinstance(value, dict):
            waiting += itertools.islice(dict.values(value), MOST_PARTS)
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, item.name, None) for item in fields(value)]
