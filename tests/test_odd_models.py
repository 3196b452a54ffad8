"""Models and loops that are not the usual ones, held against plain autograd in float64."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import io
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradexporter.hooks import outputs
from gradexporter.monitor import Monitor
from gradexporter.records import FindingKind, LayerStats, StepReport
from tests import reference

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
Watch = Callable[..., Monitor]
Loss = Callable[[Any], Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def x_for(model: nn.Module) -> Tensor:
    return X.to(next(model.parameters()).dtype)


def square(model: nn.Module) -> Tensor:
    loss: Tensor = model(x_for(model)).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def reported(monitor: Monitor) -> StepReport:
    assert monitor.flush()
    assert monitor.report is not None
    return monitor.report


def layer(report: StepReport, name: str) -> LayerStats:
    return next(row for row in report.layers.rows() if row.layer == name)


def train(
    watch: Watch, make: Callable[[], nn.Module], loss_of: Loss = square, steps: int = 3, rel: float = 1e-5
) -> StepReport:
    """Trains twice, watched and not; the weights are the same and each gradient equals the reference."""

    def run(watched: bool) -> tuple[nn.Module, Monitor | None]:
        torch.manual_seed(0)
        model = make()
        optimizer = sgd(model)
        monitor = watch(model, optimizer) if watched else None
        for step in range(1, steps + 1):
            state = torch.get_rng_state()
            norm = reference.norm(reference.gradients(model, loss_of)) if watched else 0.0
            torch.set_rng_state(state)
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if monitor is not None:
                assert reported(monitor).step == step
                assert reported(monitor).gradient_norm == pytest.approx(norm, rel=rel)
        return model, monitor

    bare, _ = run(False)
    model, monitor = run(True)
    assert monitor is not None
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return reported(monitor)


# -- autograd -----------------------------------------------------------------------------------


def gradient_penalty(model: nn.Module) -> Tensor:
    x = x_for(model).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x_for(model)).mean() + (gradient.norm(dim=1) - 1).square().mean()


def twice(model: nn.Module) -> Tensor:
    loss = square(model)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def meta_learning(model: nn.Module) -> Tensor:
    held = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, held, (x_for(model),)).square().mean()
        gradients = torch.autograd.grad(loss, list(held.values()), create_graph=True)
        held = {name: value - 0.1 * g for (name, value), g in zip(held.items(), gradients, strict=True)}  # type: ignore[misc]
    outer: Tensor = torch.func.functional_call(model, held, (x_for(model),)).square().mean()
    return outer


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        result: Tensor = 2 * gradient * context.saved_tensors[0]
        return result


class Derivative(nn.Module):
    """Returns the derivative of a network by its input, as physics-informed networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return gradient


@pytest.mark.matrix("autograd")
@pytest.mark.parametrize(
    ("make", "loss_of"),
    [
        pytest.param(net, gradient_penalty, id="gradient penalty"),
        pytest.param(net, twice, id="double backward"),
        pytest.param(net, meta_learning, id="meta learning"),
        pytest.param(net, lambda model: Square.apply(model(x_for(model))).mean(), id="function"),
        pytest.param(Derivative, square, id="derivative in the forward"),
    ],
)
def test_higher_derivatives_are_one_step_with_the_gradient_of_the_loss(
    watch: Watch, make: Callable[[], nn.Module], loss_of: Loss
) -> None:
    report = train(watch, make, loss_of)

    assert report.activation_max_abs is not None


@pytest.mark.matrix("autograd")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_detecting_anomalies_changes_nothing(watch: Watch) -> None:
    with torch.autograd.set_detect_anomaly(True):
        train(watch, net)


@pytest.mark.matrix("autograd")
def test_several_backwards_of_one_graph_and_of_parts_of_it_add_up(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = square(model)
        loss.backward(retain_graph=True)
        if step % 2:
            (2 * loss).backward(inputs=list(model[2].parameters()))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = reference.norm(gradients)
        optimizer.step()

        assert reported(monitor).step == step + 1
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("autograd")
def test_gradients_that_hooks_of_the_users_change_are_measured_as_they_are_used(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    monitor = watch(model, optimizer)

    def clamp(parameter: Any) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    model[2].weight.register_post_accumulate_grad_hook(clamp)  # type: ignore[no-untyped-call]
    for _ in range(3):
        optimizer.zero_grad()
        square(model).backward()
        norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()

        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("per sample")
def test_gradients_of_single_samples_are_measured_as_the_update_uses_them(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)

    def loss_of(held: dict[str, Tensor], x: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, held, (x[None],)).square().mean()
        return loss

    for step in range(1, 4):
        norm = reference.norm(reference.gradients(model, square))
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(held, X)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert reported(monitor).activation_max_abs is None
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["activation"] is False


@pytest.mark.matrix("rewritten")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_that_the_loop_makes_of_several_is_measured_as_it_is_used(watch: Watch, in_place: bool) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for step in range(1, 6):
        kept = []
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            model(X * factor).square().mean().backward()
            kept.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        for parameter, first, second in zip(model.parameters(), *kept, strict=True):
            if in_place:
                parameter.grad.copy_(first + second)  # type: ignore[union-attr]
            else:
                parameter.grad = first + second
        norm = reference.norm(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        optimizer.step()

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert reported(monitor).clip_factor is None
    assert monitor.snapshot is not None
    assert monitor.snapshot.clipped_steps == 0
    assert monitor.snapshot.itself.signal_available["pre_clip"] is False


# -- several models and optimizers --------------------------------------------------------------


@pytest.mark.matrix("optimizers")
@pytest.mark.parametrize("critics", [1, 3])
@pytest.mark.parametrize("toggle", [False, True])
def test_adversaries_step_in_turn_each_with_its_own_gradient(watch: Watch, critics: int, toggle: bool) -> None:
    generator = net()
    critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    monitor = watch(both, [first, second])
    steps = 0

    def update(optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        nonlocal steps
        norm = reference.norm(p.grad for p in part.parameters() if p.grad is not None)
        optimizer.step()
        steps += 1
        assert reported(monitor).step == steps
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)

    for _ in range(4):
        for _ in range(critics):
            if toggle:
                critic.requires_grad_(True)
            second.zero_grad()
            critic(torch.randn(5, 3)).mean().backward()
            (-critic(generator(X).detach()).mean()).backward()
            update(second, critic)
        if toggle:
            critic.requires_grad_(False)
        first.zero_grad()
        critic(generator(X)).mean().backward()
        update(first, generator)


@pytest.mark.matrix("optimizers")
def test_a_trunk_that_two_optimizers_share_is_in_the_steps_of_both(watch: Watch) -> None:
    trunk, heads = nn.Linear(6, 6), (nn.Linear(6, 1), nn.Linear(6, 1))
    model = nn.ModuleList([trunk, *heads])
    optimizers = [torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1) for head in heads]
    monitor = watch(model, optimizers)
    for _ in range(2):
        for optimizer, head in zip(optimizers, heads, strict=True):
            model.zero_grad()
            head(trunk(X)).square().mean().backward()
            norm = reference.norm(p.grad for p in (*trunk.parameters(), *head.parameters()) if p.grad is not None)
            optimizer.step()
            assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert reported(monitor).step == 4


@pytest.mark.matrix("optimizers")
def test_a_loss_with_parameters_of_its_own_is_part_of_the_step(watch: Watch) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, y: Tensor) -> Tensor:
            return (y * self.temperature).square().mean()

    model, criterion = net(), Tempered()
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.01}], lr=0.1
    )
    monitor = watch(nn.ModuleList([model, criterion]), optimizer)
    criterion(model(X)).backward()
    norm = reference.norm(p.grad for p in (*model.parameters(), *criterion.parameters()) if p.grad is not None)
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert layer(report, "1").gradient_norm == pytest.approx(criterion.temperature.grad.abs().item())
    assert report.group_learning_rates == (0.1, 0.01)


# -- parameters that come, go and change ----------------------------------------------------------


@pytest.mark.matrix("replaced")
@pytest.mark.parametrize("at_once", [True, False])
def test_layers_that_are_frozen_and_unfrozen_are_measured_while_they_learn(watch: Watch, at_once: bool) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
            model[2].requires_grad_(not at_once)
        norm = reference.norm(reference.gradients(model, square))
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()
        report = reported(monitor)

        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert (layer(report, "0").gradient_norm is None) is (step < 2)
    assert (layer(report, "2").gradient_norm is None) is at_once
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["pre_clip"] is True


@pytest.mark.matrix("replaced")
def test_an_adapter_that_is_put_in_later_is_a_layer_from_then_on(watch: Watch) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.up(self.down(x))

    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for step in range(1, 5):
        if step == 3:
            model.requires_grad_(False)
            model[0] = Adapted(model[0])
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        norm = reference.norm(reference.gradients(model, square))
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()
        report = reported(monitor)

        assert report.step == step
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert [row.layer for row in report.layers.rows() if row.gradient_norm is not None] == ["0.down", "0.up"]
    assert layer(report, "0.base").activation_rms is not None


@pytest.mark.matrix("replaced")
def test_a_dtype_and_parameters_that_change_midway_are_followed(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for step in range(1, 7):
        if step == 3:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if step == 5:
            model.bfloat16()
        optimizer.zero_grad()
        square(model).backward()
        norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert reported(monitor).dtype_max == torch.finfo(torch.bfloat16).max


# -- modules ----------------------------------------------------------------------------------------


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(6))})
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.listed[0] * self.listed[1] * self.scale + self.named["bias"]


def parametrized() -> nn.Module:
    model = net()
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[2], orthogonal_map="cayley", use_trivialization=False)
    return model


@pytest.mark.matrix("modules")
@pytest.mark.parametrize("make", [Lists, parametrized])
def test_each_parameter_belongs_to_the_module_that_holds_it(watch: Watch, make: Callable[[], nn.Module]) -> None:
    report = train(watch, make, rel=1e-4)

    if make is Lists:
        assert report.layers.names == ("listed", "named")
        assert report.activation_max_abs is None  # their forwards never run
    else:
        assert "0.parametrizations.weight" in report.layers.names
        assert layer(report, "0").activation_rms is not None


class Repeated(nn.Module):
    """One cell, called very often; what it returns in one of the calls is not finite."""

    def __init__(self, calls: int, lost: int = -1) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.calls, self.lost = calls, lost

    def forward(self, x: Tensor) -> Tensor:
        for call in range(self.calls):
            step = self.cell(x * math.inf if call == self.lost else x)
            if call != self.lost:
                x = x + 0.01 * torch.tanh(step)
        return x


@pytest.mark.matrix("calls")
def test_what_a_step_costs_is_bounded_however_often_a_layer_is_called(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    look = outputs.stats.host.Accumulator.add

    def counted(self: Any, layer: int, tensor: Tensor, *, full: bool) -> None:
        looks.append(full)
        look(self, layer, tensor, full=full)

    monkeypatch.setattr(outputs.stats.host.Accumulator, "add", counted)
    model = Repeated(1000)
    optimizer = sgd(model)
    monitor = watch(model, optimizer, kernels="stock")  # whose calls are counted
    for step in (1, 2):
        looks.clear()
        norm = reference.norm(reference.gradients(model, square))
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()

        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert reported(monitor).step == step
        assert looks.count(True) == outputs.MEASURED_CALLS
        assert len(looks) == outputs.CHECKED_CALLS + len(range(outputs.CHECKED_CALLS, 1000, 16))


@pytest.mark.matrix("calls")
def test_what_is_lost_in_a_late_call_is_still_seen(watch: Watch) -> None:
    model = Repeated(300, lost=200)
    optimizer = sgd(model)
    monitor = watch(model, optimizer, activation_every=1000)
    square(model).backward()
    optimizer.step()
    report = reported(monitor)

    assert layer(report, "cell").activation_nonfinite == 5 * 6
    assert report.first_nonfinite is not None
    assert report.first_nonfinite.layer == "cell"


@dataclasses.dataclass
class Record:
    y: Tensor
    more: Any = None


class Named(NamedTuple):
    y: Tensor
    more: Any = None


class Foreign:
    def __init__(self, y: Tensor) -> None:
        self.y = y


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], bool]] = {
    "dict": (lambda y: {"a": {"b": y}}, lambda out: out["a"]["b"], True),
    "tuple": (lambda y: (None, 1, y), lambda out: out[2], True),
    "dataclass": (Record, lambda out: out.y, True),
    "named tuple": (Named, lambda out: out.y, True),
    "foreign object": (Foreign, lambda out: out.y, False),
    "generator": (lambda y: (one for one in [y]), next, False),
    "function": (lambda y: lambda: y, lambda out: out(), False),
}


class Wrapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return WRAPS[self.kind][0](x * self.weight)


class Unwrapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Wrapping(kind)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(WRAPS[self.inner.kind][1](self.inner(x)))


@pytest.mark.matrix("outputs")
@pytest.mark.parametrize("kind", WRAPS)
def test_outputs_are_measured_where_they_can_be_seen_and_handed_on_as_they_are(watch: Watch, kind: str) -> None:
    report = train(watch, lambda: Unwrapping(kind))

    assert (layer(report, "inner").activation_max_abs is not None) is WRAPS[kind][2]
    assert layer(report, "head").activation_max_abs is not None


@pytest.mark.matrix("outputs")
def test_a_layer_that_returns_none_has_a_gradient_and_no_activation(watch: Watch) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.offset = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> None:
            self.result = self.layer(x) + self.offset

    def loss_of(model: Any) -> Tensor:
        model(x_for(model))
        loss: Tensor = model.result.square().mean()
        return loss

    class Copied(Aside):
        def __deepcopy__(self, memo: Any) -> Aside:  # the result is part of a graph
            twin = Aside()
            twin.load_state_dict(self.state_dict())
            return twin

    report = train(watch, Copied, loss_of)

    assert layer(report, "(root)").activation_max_abs is None
    assert layer(report, "(root)").gradient_norm is not None


# -- dtypes -----------------------------------------------------------------------------------------


@pytest.mark.matrix("dtypes")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16])
def test_parameters_of_narrow_dtypes_beside_trained_ones_are_measured_wide(watch: Watch, dtype: torch.dtype) -> None:
    model = net()
    model.stored = nn.Parameter(torch.full((300, 300), 16.0).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    monitor = watch(model, optimizer)
    model[2](model[1](model[0](X))).square().mean().backward()
    norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    if dtype is torch.int8:
        assert "(root)" not in report.layers.names
    else:
        assert layer(report, "(root)").parameter_norm == pytest.approx(16.0 * 300, rel=1e-5)


@pytest.mark.matrix("dtypes")
def test_values_that_have_no_square_in_float64_have_a_finite_norm(watch: Watch) -> None:
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    (model(X.double()) * 1e200).sum().backward()
    norm = reference.norm(p.grad / 1e200 for p in model.parameters() if p.grad is not None) * 1e200
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(norm, rel=1e-9)
    assert report.nonfinite["gradient"] == 0
    assert FindingKind.OVERFLOW_IMMINENT in {finding.kind for finding in report.findings}


@pytest.mark.matrix("dtypes")
def test_under_autocast_gradients_are_those_of_the_weights(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X).float().square().mean()
    loss.backward()
    norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()

    assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert reported(monitor).dtype_max == torch.finfo(torch.bfloat16).max


# -- evaluation beside training -----------------------------------------------------------------------


@pytest.mark.matrix("evaluation")
def test_averages_generation_and_inference_between_steps_are_not_training(watch: Watch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(1, 4):
        with torch.no_grad():
            model(X * 1e8)
        model.eval()
        model(X * 1e8)
        with torch.inference_mode():
            model(X * 1e8)
        model.train()
        norm = reference.norm(reference.gradients(model, square))
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()
        average.update_parameters(model)
        average(X * 1e8)

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert reported(monitor).activation_max_abs < 100  # type: ignore[operator]


# -- threads and processes ------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor, count: int) -> None:
    for _ in range(count):
        loss = monitor.observe(square(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.matrix("threads")
def test_loops_in_threads_do_not_hear_of_each_other(watch: Watch) -> None:
    def run(seed: int) -> tuple[int, float | None, float]:
        model = net(seed)
        optimizer = sgd(model)
        monitor = watch(model, optimizer)
        steps(model, optimizer, monitor, 30)
        norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
        return reported(monitor).step, reported(monitor).gradient_norm, norm

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for step, measured, norm in threads.map(run, range(3)):
            assert step == 30
            assert measured == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("threads")
@pytest.mark.parametrize("by_hand", [False, True])
def test_forwards_in_a_pool_and_a_backward_in_another_thread_are_one_step(watch: Watch, by_hand: bool) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = watch(model, None if by_hand else optimizer)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for step in range(1, 11):
            losses = list(threads.map(lambda factor: model(X * factor).square().mean(), range(4)))
            optimizer.zero_grad()
            threads.submit(sum(losses).backward).result()  # type: ignore[union-attr]
            norm = reference.norm(p.grad for p in model.parameters() if p.grad is not None)
            threads.submit(optimizer.step).result()

            assert reported(monitor).step == step
            assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    largest = max(model[0](X * factor).detach().abs().max().item() for factor in range(4))
    assert layer(reported(monitor), "0").activation_max_abs == pytest.approx(largest, rel=0.05)


@pytest.mark.matrix("threads")
def test_threads_that_update_one_model_at_once_meet_no_fault_of_ours(watch: Watch) -> None:
    model = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for _ in range(3)]
    monitor = watch(model, optimizers)
    done = []

    def run(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(40):
            try:
                square(model).backward()
            except RuntimeError:  # torch's own: a weight was changed by another thread under this graph
                continue
            optimizer.step()
            done.append(optimizer)

    threads = [threading.Thread(target=run, args=(optimizer,)) for optimizer in optimizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert reported(monitor).step >= 40
    assert reported(monitor).step <= len(done)


@pytest.mark.matrix("copies")
@pytest.mark.parametrize("by_hand", [False, True])
def test_copies_of_model_optimizer_and_monitor_are_not_watched(watch: Watch, by_hand: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = watch(model, None if by_hand else optimizer)
    steps(model, optimizer, monitor, 2)
    file = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer, "monitor": monitor}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    copies = [
        copy.deepcopy((model, optimizer)),
        (saved["model"], saved["optimizer"]),
        pickle.loads(pickle.dumps((model, optimizer))),
    ]
    for twin, own in copies:
        steps(twin, own, Monitor(), 2)

    assert reported(monitor).step == 2
    assert saved["monitor"].snapshot is None


@pytest.mark.matrix("copies")
def test_processes_that_get_a_watched_model_watch_nothing(tmp_path: Path) -> None:
    script = """
        import multiprocessing, threading
        import torch
        from torch import nn
        import gradexporter

        class Rows(torch.utils.data.Dataset):
            def __init__(self, model): self.model = model
            def __len__(self): return 2
            def __getitem__(self, at):
                with torch.no_grad():
                    return self.model(torch.ones(4))

        def child(model, answers):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            answers.put([thread.name for thread in threading.enumerate() if "gradexporter" in thread.name])

        if __name__ == "__main__":
            torch.set_num_threads(1)
            model = nn.Sequential(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            monitor = gradexporter.watch(model, optimizer, host="127.0.0.1", port=0)
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                answers = context.Queue()
                process = context.Process(target=child, args=(model, answers))
                process.start()
                assert answers.get(timeout=60) == [], method
                process.join()
            for batch in torch.utils.data.DataLoader(Rows(model), num_workers=1, multiprocessing_context="fork"):
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
            assert monitor.flush() and monitor.report.step == 2, monitor.report
            assert not any(monitor.snapshot.itself.failures.values()), monitor.snapshot.itself.failures
            monitor.close()
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(script))
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(program)],
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.matrix("within backward")
def test_a_run_whose_optimizers_step_within_the_backward_is_continued(watch: Watch) -> None:
    def start() -> tuple[nn.Module, Monitor]:
        model = net()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

        def step(parameter: Any) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        return model, watch(model, list(optimizers.values()))

    model, monitor = start()
    for _ in range(3):
        square(model).backward()
    state = monitor.state_dict()
    again, continued = start()

    assert continued.load_state_dict(state)
    square(again).backward()
    assert reported(continued).step == 4
