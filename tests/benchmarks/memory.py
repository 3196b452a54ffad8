"""Tensor memory: how high a step reaches, and what is still there after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from contestants import Contestant, Everything
from models import build
from torch.profiler import ProfilerActivity, profile, record_function

from gradexporter.records import LAYER_COLUMNS


@dataclass
class Memory:
    """Bytes that everything at every step adds on one model."""

    model: str
    layers: int
    extra_peak: int
    """Of tensors alive at once within a step."""
    kept: int
    """Of tensors still alive after it."""

    @property
    def kept_a_statistic(self) -> float:
        """``kept`` by layer and statistic."""
        return self.kept / (self.layers * len(LAYER_COLUMNS))


def measure(name: str, *, small: bool = False) -> Memory:
    """Everything at every step against the bare step."""
    subject = build(name, small=small)
    bare = Contestant(subject)
    bare.step()
    peak, _ = _traced(bare.step)
    ours: list[Everything] = []
    _, kept = _traced(lambda: ours.append(Everything(subject, kernels="stock")))  # watches, and makes one step
    ours[0].attach()
    ours[0].step()
    ours[0].settle()
    with_us, _ = _traced(ours[0].step)
    ours[0].settle()
    ours[0].detach()
    layers = len(ours[0].capture.layers)
    ours[0].close()
    return Memory(name, layers, with_us - peak, max(0, kept))


def _traced(run: Callable[[], object]) -> tuple[int, int]:
    """Highest sum of live tensor bytes above the start, and the sum at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        torch.empty(1)
        with record_function("begins"):
            pass
        run()
    live = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "begins":
            live = peak = 0
        elif event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, live
