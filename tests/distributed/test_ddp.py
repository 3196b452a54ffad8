"""Distributed data parallelism on two processes, held against one process with the whole batch in float64."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradexporter.hooks.watched import Watched
from gradexporter.records import LayerStats, StepReport
from tests.distributed.harness import Ranks, logged, rank, watching

ROWS = 16
STEPS = 4
EVERY = "left right spare"


class Net(nn.Module):
    """Branches, of which a batch may use some alone."""

    def __init__(self, checkpointed: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, branches: str = EVERY) -> Tensor:
        x = torch.tanh(self.first(x))
        for name in branches.split():
            branch = getattr(self, name)
            if self.checkpointed is None:
                x = x + torch.tanh(branch(x))
            else:
                x = x + torch.tanh(checkpoint(branch, x, use_reentrant=self.checkpointed == "reentrant"))
        return self.last(x)


@dataclass
class Loop:
    """A training loop under DistributedDataParallel."""

    wrap: dict[str, Any] = field(default_factory=dict)
    hook: str | None = None
    branches: tuple[str, str] = (EVERY, EVERY)
    """What each rank uses."""
    micro_batches: int = 1
    """Backwards an update, all but the last in ``no_sync``."""
    forwards: int = 1
    """Forward passes before each backward."""
    scaled: bool = False
    clip: float | None = None
    checkpointed: str | None = None
    batches: tuple[int, int] = (STEPS, STEPS)
    """How many each rank has; uneven ones are joined."""
    watched: str = "wrapper"
    """What is watched: the wrapper, the module in it, the module before it is wrapped, or nothing."""


@dataclass
class Outcome:
    """What one rank saw."""

    reports: list[StepReport]
    gradients: list[dict[str, Tensor]]
    """Of each step, as they were after backward."""
    losses: list[float]
    weights: list[Tensor]
    passes: list[int]
    """Gradient measurements up to each step."""
    warnings: list[str]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)


def train(loop: Loop) -> Outcome:
    """Runs a loop on one rank."""
    model = Net(loop.checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if loop.scaled else None
    outcome = Outcome([], [], [], [], [], [])
    measured = Watched.measure_gradients
    passes = 0

    def counted(watched: Watched) -> None:
        nonlocal passes
        passes += 1
        measured(watched)

    with contextlib.ExitStack() as stack:
        outcome.warnings = stack.enter_context(logged())
        monitor = None
        if loop.watched == "before":
            monitor = stack.enter_context(watching(model, optimizer, scaler))
        wrapper = DistributedDataParallel(model, **loop.wrap)
        register(wrapper, loop.hook)
        if loop.watched in ("wrapper", "module"):
            target = wrapper if loop.watched == "wrapper" else model
            monitor = stack.enter_context(watching(target, optimizer, scaler))
        Watched.measure_gradients = counted  # type: ignore[method-assign]
        stack.callback(setattr, Watched, "measure_gradients", measured)
        if loop.batches[0] != loop.batches[1]:
            stack.enter_context(wrapper.join())
        for step in range(loop.batches[rank()]):
            optimizer.zero_grad()
            outcome.losses.append(backward(loop, wrapper, scaler, step))
            scale = scaler.get_scale() if scaler is not None else 1.0
            outcome.gradients.append(
                {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}
            )
            if scaler is not None and loop.clip is not None:
                scaler.unscale_(optimizer)
            if loop.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            outcome.passes.append(passes)
            if monitor is not None:
                assert monitor.flush()
                assert monitor.report is not None
                outcome.reports.append(monitor.report)
    outcome.weights = [parameter.detach() for parameter in model.parameters()]
    return outcome


def backward(loop: Loop, model: DistributedDataParallel, scaler: Any, step: int) -> float:
    x, y = (part.chunk(2)[rank()] for part in batch(step))
    pieces = list(zip(x.chunk(loop.micro_batches), y.chunk(loop.micro_batches), strict=True))
    total = 0.0
    for at, (some, targets) in enumerate(pieces):
        with model.no_sync() if at < len(pieces) - 1 else contextlib.nullcontext():
            outputs = [model(part, loop.branches[rank()]) for part in some.chunk(loop.forwards)]
            loss = nn.functional.mse_loss(torch.cat(outputs), targets) / len(pieces)
            (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.item()
    return total


def register(model: DistributedDataParallel, hook: str | None) -> None:
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        model.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))


def reference(loop: Loop) -> list[dict[str, Tensor]]:
    """Gradients of each step by layer: one process, the whole batch, float64."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = []
    for step in range(max(loop.batches)):
        optimizer.zero_grad()
        x, y = (part.double().chunk(2) for part in batch(step))
        there = [at for at in range(2) if step < loop.batches[at]]
        loss = sum(nn.functional.mse_loss(model(x[at], loop.branches[at]), y[at]) / 2 for at in there)
        assert isinstance(loss, Tensor)
        loss.backward()
        steps.append(by_layer({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
    return steps


def by_layer(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        layers.setdefault(name.rpartition(".")[0], []).append(gradient.flatten())
    return {name: torch.cat(parts) for name, parts in layers.items()}


def assert_equal(report: StepReport, expected: dict[str, Tensor], tolerance: float) -> None:
    rows: dict[str, LayerStats] = {row.layer: row for row in report.layers.rows()}
    observed = {name for name, row in rows.items() if row.gradient_norm is not None}
    assert observed == set(expected)
    for name, gradient in expected.items():
        assert rows[name].gradient_norm == pytest.approx(gradient.norm().item(), rel=tolerance)
        assert rows[name].gradient_max_abs == pytest.approx(gradient.abs().max().item(), rel=tolerance)
    norm = torch.cat(list(expected.values())).norm().item()
    assert report.gradient_norm == pytest.approx(norm, rel=tolerance)


LOOPS = {
    "plain": Loop(),
    "module": Loop(watched="module"),
    "wrapped after watch": Loop(watched="before"),
    "static graph": Loop(wrap={"static_graph": True}),
    "static graph, unused": Loop(wrap={"static_graph": True}, branches=("left right", "left right")),
    "unused on one rank": Loop(wrap={"find_unused_parameters": True}, branches=("left", "left right")),
    "unused on both": Loop(wrap={"find_unused_parameters": True}, branches=("left", "right")),
    "bucket views": Loop(wrap={"gradient_as_bucket_view": True}),
    "several buckets": Loop(wrap={"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}),
    "several forwards": Loop(forwards=2),
    "no_sync": Loop(micro_batches=4),
    "no_sync, unused": Loop(micro_batches=2, wrap={"find_unused_parameters": True}, branches=("left", "right spare")),
    "uneven": Loop(batches=(4, 2)),
    "scaled and clipped": Loop(scaled=True, clip=0.3),
    "clipped": Loop(clip=0.3, micro_batches=2),
    "checkpointed": Loop(checkpointed="not"),
    "checkpointed, reentrant": Loop(checkpointed="reentrant", wrap={"static_graph": True}),
    "checkpointed, reentrant, no_sync": Loop(checkpointed="reentrant", micro_batches=2),
    "fp16 hook": Loop(hook="fp16"),
    "PowerSGD": Loop(hook="powersgd"),
}


@functools.cache
def watched(ranks: Ranks, name: str) -> list[Outcome]:
    """What each rank saw in one of the loops."""
    return ranks.run(train, LOOPS[name])


@pytest.mark.matrix("ddp")
@pytest.mark.parametrize("name", LOOPS)
def test_the_reduced_gradient_is_published_on_every_rank(two_ranks: Ranks, name: str) -> None:
    loop = LOOPS[name]
    ranks = watched(two_ranks, name)
    expected = reference(loop)

    assert [len(outcome.reports) for outcome in ranks] == list(loop.batches)
    for outcome in ranks:
        for step, report in enumerate(outcome.reports):
            assert (report.step, report.applied) == (step + 1, True)
            assert_equal(report, by_layer(outcome.gradients[step]), 1e-5)
            if loop.hook != "powersgd":
                assert_equal(report, expected[step], 5e-3 if loop.hook == "fp16" else 1e-4)
            if loop.clip is not None:
                norm = torch.cat(list(by_layer(outcome.gradients[step]).values())).norm().item()
                assert report.clip_factor == pytest.approx(min(1.0, loop.clip / norm), rel=1e-3)
        assert outcome.warnings == []
    for one, other in zip(ranks[0].reports, ranks[1].reports, strict=False):
        assert one.gradient_norm == other.gradient_norm


@pytest.mark.matrix("ddp")
@pytest.mark.parametrize("name", LOOPS)
def test_losses_and_weights_are_those_of_a_run_that_is_not_watched(two_ranks: Ranks, name: str) -> None:
    bare: list[Outcome] = two_ranks.run(train, replace(LOOPS[name], watched="nothing"))

    for one, other in zip(watched(two_ranks, name), bare, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.matrix("ddp")
def test_an_update_of_several_micro_batches_costs_one_pass_after_the_first(two_ranks: Ranks) -> None:
    for outcome in watched(two_ranks, "no_sync"):
        assert [later - earlier for earlier, later in zip(outcome.passes, outcome.passes[1:], strict=False)] == [
            1,
            1,
            1,
        ]
