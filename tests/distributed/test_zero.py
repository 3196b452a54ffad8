"""Optimizers whose ranks share the work, and gradients that the loop reduces by hand, on two processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradexporter
from gradexporter.config import ConfigError
from gradexporter.records import StepReport
from tests.distributed.harness import Ranks, logged, rank, watching

STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 1, generator=generator)


@dataclass
class Outcome:
    """What one rank saw."""

    reports: list[StepReport]
    weights: list[Tensor]
    losses: list[float]
    signals: dict[str, bool]
    lines: list[str]


def train(loop: str, watched: bool) -> Outcome:
    model = net()
    wrapper: nn.Module = model if loop == "by hand" else DistributedDataParallel(model)
    optimizer = optimizer_of(loop, model)
    reports, losses = [], []
    with logged() as lines, watching(wrapper, optimizer, disabled=not watched) as monitor:
        for step in range(STEPS):
            x, y = (part.chunk(2)[rank()] for part in batch(step))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapper(x), y)
            losses.append(loss.item())
            loss.backward()
            if loop == "by hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
            optimizer.step()
            if watched:
                assert monitor.flush()
                assert monitor.report is not None
                reports.append(monitor.report)
        signals = dict(monitor.snapshot.itself.signal_available) if monitor.snapshot is not None else {}
    return Outcome(reports, [parameter.detach() for parameter in model.parameters()], losses, signals, lines)


def optimizer_of(loop: str, model: nn.Module) -> Any:
    # Not at the top: they compile TorchScript when they are imported, with warnings of torch's own.
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    if loop == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    if loop == "local":
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1, warmup_steps=0))
    return torch.optim.Adam(model.parameters(), lr=0.01)


@dataclass
class Step:
    """One step of the reference, by layer."""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    momentum: dict[str, float]
    largest: float


def reference() -> list[Step]:
    """One process, the whole batch, float64."""
    model = net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = []
    for step in range(STEPS):
        x, y = (part.double() for part in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        layers = {name: list(model[int(name)].parameters()) for name in ("0", "2")}
        gradients = {
            name: torch.cat([p.grad.flatten() for p in held if p.grad is not None]) for name, held in layers.items()
        }
        optimizer.step()
        moments = {
            f"{name}.{at}": optimizer.state[p]["exp_avg"].abs().max().item()
            for name, held in layers.items()
            for at, p in enumerate(held)
        }
        parameters = {name: torch.cat([p.detach().flatten() for p in held]) for name, held in layers.items()}
        steps.append(Step(gradients, parameters, moments, max(moments.values())))
    return steps


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("zero", marks=pytest.mark.matrix("zero")),
        pytest.param("local", marks=pytest.mark.matrix("ddp")),
        pytest.param("by hand", marks=pytest.mark.matrix("reduced after")),
    ],
)
def test_gradients_and_parameters_are_those_of_the_whole_batch_on_every_rank(two_ranks: Ranks, loop: str) -> None:
    ranks: list[Outcome] = two_ranks.run(train, loop, True)
    bare: list[Outcome] = two_ranks.run(train, loop, False)

    for outcome, other in zip(ranks, bare, strict=True):
        for report, expected in zip(outcome.reports, reference(), strict=True):
            rows = {row.layer: row for row in report.layers.rows()}
            for name, gradient in expected.gradients.items():
                assert rows[name].gradient_norm == pytest.approx(gradient.norm().item(), rel=1e-4)
                assert rows[name].parameter_norm == pytest.approx(expected.parameters[name].norm().item(), rel=1e-4)
            norm = torch.cat(list(expected.gradients.values())).norm().item()
            assert report.gradient_norm == pytest.approx(norm, rel=1e-4)
            assert report.clip_factor in (None, 1.0)
        assert outcome.losses == other.losses
        assert all(torch.equal(a, b) for a, b in zip(outcome.weights, other.weights, strict=True))


@pytest.mark.matrix("zero")
def test_optimizer_state_is_that_of_the_ranks_share_and_the_largest_of_all_is_the_runs(two_ranks: Ranks) -> None:
    ranks: list[Outcome] = two_ranks.run(train, "zero", True)

    for step, expected in enumerate(reference()):
        shares = [outcome.reports[step].momentum_max_abs for outcome in ranks]
        assert all(share is not None for share in shares)
        assert max(share for share in shares if share is not None) == pytest.approx(expected.largest, rel=1e-4)
        assert shares[0] != shares[1]
    for outcome in ranks:
        assert outcome.signals["update_ratio"] is False
        assert all(report.update_ratio is None for report in outcome.reports)
        (line,) = outcome.lines
        assert "ZeroRedundancyOptimizer" in line
        assert "update ratios are absent" in line


@pytest.mark.matrix("reduced after")
def test_a_gradient_that_is_reduced_by_hand_is_measured_at_the_update_and_the_signal_says_so(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(train, "by hand", True):
        assert outcome.signals["gradient"] is True
        assert outcome.signals["pre_clip"] is False


def refused() -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, overlap_with_ddp=True
    )
    try:
        gradexporter.watch(model, optimizer, serve=False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.matrix("zero")
def test_an_update_inside_the_backward_is_refused_in_words(two_ranks: Ranks) -> None:
    assert all("overlap_with_ddp=False" in text for text in two_ranks.run(refused))
