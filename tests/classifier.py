"""A small classifier, its loss on seeded batches, and what is said of it: by float64, and by a monitor."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from gradexporter.monitor import Monitor
from gradexporter.records import LayerStats, StepReport


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(seed: int = 1, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    x, y = data(seed)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def expected(model: nn.Module, seed: int = 1, factor: float = 1.0) -> dict[str, float]:
    """Gradient norms of a float64 copy of the model, one a layer, and that of all under ''."""
    twin = copy.deepcopy(model).double()
    (loss_of(twin, seed) * factor).backward()
    norms = {
        name: math.hypot(*(p.grad.norm().item() for p in module.parameters(recurse=False) if p.grad is not None))
        for name, module in twin.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    return {**norms, "": math.hypot(*norms.values())}


def reported(monitor: Monitor) -> StepReport:
    assert monitor.flush()
    report = monitor.report
    assert report is not None
    return report


def layer(report: StepReport, name: str) -> LayerStats:
    return next(row for row in report.layers.rows() if row.layer == name)


def signal(monitor: Monitor, name: str) -> bool | None:
    assert monitor.flush()
    assert monitor.snapshot is not None
    return monitor.snapshot.itself.signal_available.get(name)
