"""What is taken over from optimizers that keep partitions; DeepSpeed itself is in tests/distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradexporter.monitor import Monitor


class ZeROOptimizer:
    """The outside of DeepSpeed's: the norm and the scale are said after the update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(42))], lr=0.1)
        self.loss_scale = 16.0
        self.overflow: Any = False
        self._global_grad_norm: Any = 0.0
        self.next: list[tuple[Any, Any]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> str:
        self._global_grad_norm, self.overflow = self.next.pop(0)
        return "stepped"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.parametrize("kind", [lambda value: value, torch.tensor], ids=["numbers", "tensors"])
def test_norm_scale_and_skipped_updates_of_partitions_are_taken_over(
    watch: Callable[..., Monitor], kind: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = ZeROOptimizer(model)
    optimizer.next = [(kind(3.0), kind(False)), (kind(math.inf), kind(True)), (kind(-1.0), kind(False))]
    monitor = watch(model, optimizer)

    reports = []
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        assert optimizer.step() == "stepped"
        assert monitor.flush()
        reports.append(monitor.report)

    assert [report.gradient_norm for report in reports[:2]] == [3.0, math.inf]
    assert math.isnan(reports[2].gradient_norm)
    assert [report.applied for report in reports] == [True, False, True]
    assert [report.loss_scale for report in reports] == [16.0, 16.0, 16.0]
    assert [report.learning_rate for report in reports] == [0.1, 0.1, 0.1]
    assert all(row.gradient_norm is None for row in reports[0].layers.rows())
    assert all(row.parameter_norm is not None for row in reports[0].layers.rows())
    assert monitor.snapshot is not None
    signals = monitor.snapshot.itself.signal_available
    assert [signals[name] for name in ("gradient", "layer_gradient", "pre_clip")] == [True, False, True]
    assert monitor.snapshot.nonfinite_steps["gradient"] == 1
    assert "under ZeROOptimizer gradients and parameters lie in flat partitions" in caplog.text
    monitor.close()
    assert "step" not in vars(optimizer)


def test_a_norm_that_is_not_computed_is_absent_and_no_zero(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = ZeROOptimizer(model)
    optimizer.next = [(None, False)]
    monitor = watch(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.gradient_norm is None
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["gradient"] is False


def test_a_step_that_somebody_else_had_replaced_is_put_back(watch: Callable[..., Monitor]) -> None:
    optimizer = ZeROOptimizer(net())
    theirs = optimizer.step = lambda: "theirs"  # type: ignore[method-assign]
    monitor = watch(optimizer.model, optimizer)
    assert optimizer.step() == "theirs"
    monitor.close()

    assert optimizer.step is theirs


def test_a_wrapper_without_state_of_its_own_is_measured_by_what_it_wraps(watch: Callable[..., Monitor]) -> None:
    class Passing(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.optimizer.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    model = net()
    optimizer = Passing(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    monitor = watch(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.step == 1
    assert monitor.report.momentum_max_abs is not None
