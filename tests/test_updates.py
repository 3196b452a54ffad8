"""What a step is: updates by torch's optimizers, by wrappers, by other objects, by hand and within a backward."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradexporter
from gradexporter.monitor import Monitor
from gradexporter.records import StepReport
from tests import reference

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
Watch = Callable[..., Monitor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    x = (X * factor).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).square().mean()
    return loss


def expected(model: nn.Module, factor: float = 1.0) -> float:
    return reference.norm(reference.gradients(model, lambda twin: loss_of(twin, factor)))


def reported(monitor: Monitor) -> StepReport:
    assert monitor.flush()
    assert monitor.report is not None
    return monitor.report


def signals(monitor: Monitor) -> dict[str, bool]:
    assert monitor.snapshot is not None
    return dict(monitor.snapshot.itself.signal_available)


def descend(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def through_data(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.data.sub_(0.1 * parameter.grad.data)


def assigned_data(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.data = parameter.data - 0.1 * parameter.grad.data


class Plain:
    """An optimizer that knows nothing of torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        descend(self.parameters)


class Grouped(Plain):
    """One with groups and state like torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.param_groups = [{"params": self.parameters, "lr": 0.1}]
        self.state = {parameter: {"momentum_buffer": torch.full((1,), 7.0)} for parameter in self.parameters}


class Uninitialised(torch.optim.Optimizer):
    """One of torch's whose constructor never called that of its base."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        descend(self.param_groups[0]["params"])


class Lookahead(torch.optim.Optimizer):
    """A wrapper with an update of its own around another's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)
        self.slow = [parameter.detach().clone() for parameter in inner.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            parameter.copy_(slow.lerp_(parameter, 0.5))


class PassingOn:
    """A wrapper that changes the rate and passes the step on."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    def step(self) -> None:
        self.optimizer.step()


class Derived(torch.optim.Adam):
    """Calls the step that it inherits, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation: up to the worst point nearby, then the step of another from there."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)
            parameter.grad = None

    @torch.no_grad()
    def second(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["before"])
        self.base.step()

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        self.first()
        closure()
        self.second()


@pytest.mark.matrix("by hand")
@pytest.mark.parametrize("update", [descend, through_data, assigned_data])
@pytest.mark.parametrize("clear", ["none before", "none after", "zero before", "zero after"])
def test_an_update_by_hand_is_a_step_with_its_loss_and_gradient(
    watch: Watch, update: Callable[[Iterable[nn.Parameter]], None], clear: str
) -> None:
    model = net()
    monitor = watch(model)
    how, when = clear.split()

    for step in range(1, 5):
        norm = expected(model, step)
        loss = monitor.observe(loss_of(model, step))
        if when == "before":
            model.zero_grad(set_to_none=how == "none")
        loss.backward()
        update(model.parameters())
        if when == "after":
            model.zero_grad(set_to_none=how == "none")
        report = reported(monitor)

        assert report.step == step
        assert report.loss == pytest.approx(loss.item())
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert report.parameter_norm == pytest.approx(reference.norm(model.parameters()), rel=1e-5)
        assert report.activation_max_abs is not None
    assert report.learning_rate is None
    assert report.update_ratio is None
    missing = {signal for signal, there in signals(monitor).items() if not there}
    assert missing == {"learning_rate", "update_ratio"}


@pytest.mark.matrix("by hand")
def test_an_update_by_hand_is_found_by_the_next_forward_and_accumulation_is_none(watch: Watch) -> None:
    model = net()
    monitor = watch(model)
    norms = []
    for step in range(1, 4):
        norms.append(reference.norm(reference.gradients(model, lambda twin: loss_of(twin) + loss_of(twin, 2.0))))
        loss_of(model).backward()
        with torch.no_grad():
            loss_of(model)
        loss_of(model, 2.0).backward()
        descend(model.parameters())
        model.zero_grad()
        with torch.no_grad():
            loss_of(model)
        assert monitor._parts is not None
        assert monitor._parts.worker.drain(30.0)  # flush would look for itself
        monitor._parts.capture.seal()
        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norms[-1], rel=1e-5)


@pytest.mark.matrix("by hand")
def test_a_gradient_that_is_cleared_without_an_update_is_no_step(watch: Watch) -> None:
    model = net()
    monitor = watch(model)
    for attempt in range(1, 7):
        norm = expected(model, attempt)
        loss_of(model, attempt).backward()
        if attempt % 2 == 0:
            descend(model.parameters())
        model.zero_grad()
    report = reported(monitor)

    assert report.step == 3
    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("by hand")
def test_without_gradients_on_the_parameters_the_step_is_counted_and_its_gradient_absent(watch: Watch) -> None:
    model = net()
    monitor = watch(model)
    for _ in range(3):
        gradients = torch.autograd.grad(monitor.observe(loss_of(model)), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    report = reported(monitor)

    assert report.step == 3
    assert report.loss is not None
    assert report.gradient_norm is None
    assert signals(monitor)["gradient"] is False


@pytest.mark.matrix("by hand")
@pytest.mark.parametrize("stepped", [False, True])
def test_a_scale_is_divided_out_where_the_loop_does_so_itself_and_where_its_scaler_does(
    watch: Watch, stepped: bool
) -> None:
    model = net()
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer: Any = Grouped(model.parameters())
    monitor = watch(model, optimizer if stepped else None, scaler=scaling)
    for step in range(1, 4):
        norm = expected(model)
        model.zero_grad()
        scaling.scale(loss_of(model)).backward()
        if stepped:
            scaling.step(optimizer)
            scaling.update()
        else:
            for parameter in model.parameters():
                parameter.grad /= scaling.get_scale()
            descend(model.parameters())
        report = reported(monitor)

        assert report.step == step
        assert report.applied
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert report.loss_scale == 1024.0


@pytest.mark.matrix("by hand")
def test_what_a_forward_does_to_the_parameters_is_no_update(watch: Watch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 2))
    monitor = watch(model)
    for step in range(3):
        for part in range(2):
            model(torch.tensor([2 * step + part])).square().mean().backward()
        descend(model.parameters())
        model.zero_grad()

    assert reported(monitor).step == 3


@pytest.mark.matrix("by hand")
def test_an_update_inside_the_forward_is_a_step(watch: Watch) -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x).square().mean()
            loss.backward()
            descend(self.parameters())
            self.zero_grad()
            return loss.detach()

    model = Training()
    monitor = watch(model)
    for _ in range(3):
        norm = expected(model.net)
        model(X)

    assert reported(monitor).step == 3
    assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("by hand")
def test_parameters_that_are_replaced_or_join_are_watched_from_then_on(watch: Watch) -> None:
    with torch.device("meta"):
        model = net()
    monitor = watch(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for step in range(1, 7):
        if step == 3:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        if step == 5:
            model[0].requires_grad_(False)
            model.append(nn.Linear(3, 3))
        norm = expected(model)
        model.zero_grad()
        loss_of(model).backward()
        descend(model.parameters())

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
    assert "3" in reported(monitor).layers.names


@pytest.mark.matrix("by hand")
def test_steps_on_copies_of_the_parameters_are_said_to_be_unseen(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    monitor = watch(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient_of = torch.func.grad(lambda held: torch.func.functional_call(model, held, (X,)).square().mean())
    with caplog.at_level(logging.WARNING, "gradexporter"):
        for _ in range(120):
            gradients = gradient_of(parameters)
            parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
        assert monitor.flush()

    assert monitor.report is None
    assert signals(monitor)["gradient"] is False
    assert len([record for record in caplog.records if "cannot be seen" in record.message]) == 1


@pytest.mark.matrix("own optimizers")
@pytest.mark.parametrize("make", [Plain, Grouped, Uninitialised])
def test_an_optimizer_that_has_no_hooks_is_seen_by_what_it_changes(watch: Watch, make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    monitor = watch(model, optimizer)
    for step in range(1, 4):
        norm = expected(model)
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        report = reported(monitor)

        assert report.step == step
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert report.learning_rate == (None if make is Plain else 0.1)
    assert report.momentum_max_abs == (7.0 if make is Grouped else None)


@pytest.mark.matrix("own optimizers")
def test_with_one_of_torch_each_updates_its_own_parameters(watch: Watch) -> None:
    model = net()
    optimizers = torch.optim.SGD(model[0].parameters(), lr=0.1), Plain(model[2].parameters())
    monitor = watch(model, optimizers)
    for _ in range(3):
        for optimizer, part in zip(optimizers, (model[0], model[2]), strict=True):
            model.zero_grad()
            loss_of(model).backward()
            gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
            norm = reference.norm(gradients)
            optimizer.step()
            assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)

    assert reported(monitor).step == 6


@pytest.mark.matrix("own optimizers")
@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        pytest.param(lambda p: Lookahead(torch.optim.Adam(p)), None, id="an update of its own"),
        pytest.param(lambda p: PassingOn(torch.optim.Adam(p)), True, id="passing on"),
        pytest.param(Derived, None, id="derived"),
    ],
)
def test_a_step_within_a_step_is_one(watch: Watch, make: Any, ratio: bool | None) -> None:
    torch.optim.Adam(net().parameters())  # from here on Adam.step itself has hooks
    model = net()
    optimizer = make(model.parameters())
    monitor = watch(model, optimizer)
    for step in range(1, 4):
        norm = expected(model)
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        report = reported(monitor)

        assert report.step == step
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert report.parameter_norm == pytest.approx(reference.norm(model.parameters()), rel=1e-5)
        assert report.momentum_max_abs is not None
        assert (report.update_ratio is not None) is bool(ratio)


@pytest.mark.matrix("own optimizers")
@pytest.mark.parametrize("closure", [False, True])
def test_sharpness_aware_minimisation_is_one_step_with_the_gradient_it_uses(watch: Watch, closure: bool) -> None:
    model = net()
    optimizer = Sharpness(model.parameters())
    monitor = watch(model, optimizer)

    def again() -> Tensor:
        nonlocal norm
        norm = expected(model)
        loss = loss_of(model)
        loss.backward()
        return loss

    norm = 0.0
    for step in range(1, 4):
        model.zero_grad()
        loss_of(model).backward()
        if closure:
            optimizer.step(again)
        else:
            optimizer.first()
            again()
            optimizer.second()

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert reported(monitor).momentum_max_abs is not None


def test_a_step_that_raises_is_none_and_the_next_is_one(watch: Watch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    def fails() -> Tensor:
        raise RuntimeError("the data ran out")

    for attempt in range(4):
        optimizer.zero_grad()
        norm = expected(model)
        loss_of(model).backward()
        if attempt == 1:
            with pytest.raises(RuntimeError, match="ran out"):
                optimizer.step(fails)
        else:
            optimizer.step()

    assert reported(monitor).step == 3
    assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)


# -- every optimizer of torch -------------------------------------------------------------------

CLASSES = sorted(
    {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    },
    key=lambda kind: kind.__name__,
)

MOMENTS = {
    "Adam": (True, True),
    "AdamW": (True, True),
    "NAdam": (True, True),
    "RAdam": (True, True),
    "SparseAdam": (True, True),
    "Adamax": (True, False),
    "Muon": (True, False),
    "Adadelta": (False, True),
    "Adagrad": (False, True),
    "RMSprop": (False, True),
}
"""Whether a class keeps a first and a second moment; those not named keep neither."""


def variants() -> Iterator[Any]:
    for kind in CLASSES:
        names = inspect.signature(kind).parameters
        yield pytest.param(kind, {}, id=kind.__name__)
        for option in ("foreach", "fused"):
            if option in names:
                yield pytest.param(kind, {option: True}, id=f"{kind.__name__} {option}")


class Matrices(nn.Module):
    """Matrices alone, for some optimizers take nothing else; one of them is a sparse table where that is needed."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, sparse=sparse)
        self.body = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.table(x)
        return hidden if self.table.sparse else self.body(hidden)


@pytest.mark.matrix("torch.optim")
@pytest.mark.parametrize(("kind", "options"), list(variants()))
def test_every_optimizer_of_torch_steps_once_with_what_it_keeps(
    watch: Watch, kind: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    sparse = kind.__name__ == "SparseAdam"
    index = torch.tensor([1, 4, 5])

    def train(watched: bool) -> tuple[list[Tensor], list[StepReport]]:
        torch.manual_seed(0)
        model = Matrices(sparse)
        trained = list(model.table.parameters()) if sparse else list(model.parameters())
        optimizer: Any = kind(trained, **options)
        monitor = watch(model, optimizer) if watched else None
        reports = []
        for _ in range(3):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(index).square().sum()
                loss.backward()
                return loss

            if kind is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if monitor is not None:
                norm = reference.norm(p.grad for p in trained if p.grad is not None)
                assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
                reports.append(reported(monitor))
        return [parameter.detach() for parameter in model.parameters()], reports

    bare, _ = train(False)
    weights, reports = train(True)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, bare, strict=True))
    assert [report.step for report in reports] == [1, 2, 3]
    kept = reports[-1].momentum_max_abs is not None, reports[-1].second_moment_max_abs is not None
    assert kept == MOMENTS.get(kind.__name__, (False, False))
    assert reports[-1].learning_rate is not None


# -- within the backward ------------------------------------------------------------------------


def stepping_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer a parameter, which steps as soon as the gradient is there and clears it."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return list(optimizers.values())


@pytest.mark.matrix("within backward")
@pytest.mark.parametrize("named", [True, False], ids=["optimizers", "by hand"])
def test_an_update_within_the_backward_gives_each_layer_its_own_gradient(watch: Watch, named: bool) -> None:
    model = net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    monitor = watch(model, list(optimizers.values()) if named else None)
    for factor in (1.0, 3.0, 0.5):
        twin = reference.gradients(model, lambda twin, factor=factor: loss_of(twin, factor))
        loss_of(model, factor).backward()
        layers = {row.layer: row.gradient_norm for row in reported(monitor).layers.rows()}
        assert layers["0"] == pytest.approx(reference.norm(twin[:2]), rel=1e-5)
        assert layers["2"] == pytest.approx(reference.norm(twin[2:]), rel=1e-5)


@pytest.mark.matrix("within backward")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("watched_first", [True, False])
def test_all_steps_within_one_backward_are_one(watch: Watch, known: bool, watched_first: bool) -> None:
    def train(watched: bool) -> tuple[list[Tensor], list[StepReport]]:
        model = net()
        reports = []
        monitor = None
        if watched and watched_first and not known:
            monitor = watch(model)
        optimizers = stepping_in_backward(model)
        if watched and monitor is None:
            monitor = watch(model, optimizers if known else None)
        for _ in range(4):
            norm = expected(model)
            loss = loss_of(model)
            if monitor is not None:
                monitor.observe(loss)
            loss.backward()
            if monitor is not None:
                reports.append(reported(monitor))
                assert reports[-1].gradient_norm == pytest.approx(norm, rel=1e-5)
                assert reports[-1].loss == pytest.approx(loss.item())
        return [parameter.detach() for parameter in model.parameters()], reports

    bare, _ = train(False)
    weights, reports = train(True)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, bare, strict=True))
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert reports[-1].layers.names == ("0", "2")
    assert reports[-1].learning_rate == (0.01 if known else None)
    assert (reports[-1].momentum_max_abs is not None) is known
    assert reports[-1].update_ratio is None


@pytest.mark.matrix("within backward")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_do_not_divide_an_update_within_the_backward(watch: Watch, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Any:
            x = x.clone().requires_grad_()
            for part in self.net:
                x = checkpoint(part, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x

    model = Checkpointed()
    optimizers = stepping_in_backward(model)
    monitor = watch(model, optimizers)
    for step in range(1, 5):
        norm = expected(model.net)
        monitor.observe(loss_of(model)).backward()

        assert reported(monitor).step == step
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.matrix("within backward")
def test_after_a_backward_that_fails_midway_the_next_update_is_measured_whole(watch: Watch) -> None:
    model = net()
    optimizers = stepping_in_backward(model)
    monitor = watch(model, optimizers)
    failing = False

    def fail(gradient: Tensor) -> None:
        if failing:
            raise RuntimeError("out of memory")

    model[0].weight.register_hook(fail)
    loss_of(model).backward()
    failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        loss_of(model).backward()
    part = reported(monitor)
    failing = False
    norm = expected(model)
    loss_of(model).backward()
    report = reported(monitor)

    assert part.step == 2  # parameters were updated, and so it is a step
    assert part.gradient_norm is not None
    assert report.step == 3
    assert report.gradient_norm == pytest.approx(norm, rel=1e-5)


def test_a_hundred_optimizers_within_the_backward_publish_one_rate(watch: Watch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    optimizers = stepping_in_backward(model)
    monitor = watch(model, optimizers)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
    report = reported(monitor)

    assert report.step == 2
    assert report.group_learning_rates == (0.01,)


def test_what_cannot_update_anything_is_refused(watch: Watch) -> None:
    model = net()
    for wrong in (0.1, torch.optim.SGD, model, [torch.optim.SGD(model.parameters()), "adam"]):
        with pytest.raises(gradexporter.ConfigError, match=r"optimizer must be .* or another object"):
            gradexporter.watch(model, wrong, serve=False)  # type: ignore[arg-type]
    with pytest.raises(gradexporter.ConfigError, match="holds none of the model's parameters"):
        gradexporter.watch(model, Grouped(net().parameters()), serve=False)


def test_a_copy_of_a_model_watched_by_hand_is_not_watched(watch: Watch) -> None:
    model = net()
    monitor = watch(model)
    loss_of(model).backward()
    descend(model.parameters())
    twin = copy.deepcopy(model)
    for _ in range(3):
        loss_of(twin).backward()
        descend(twin.parameters())

    assert reported(monitor).step == 1


@pytest.mark.matrix("replaced")
def test_an_optimizer_that_another_has_replaced_is_told_of_once(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(120):
        other.zero_grad()
        loss_of(model).backward()
        other.step()

    assert monitor.flush()
    assert signals(monitor)["gradient"] is False
    assert [record.getMessage() for record in caplog.records if "taken its place" in record.getMessage()] != []
    assert len(caplog.records) == 1


@pytest.mark.matrix("accumulation")
def test_a_long_accumulation_is_not_taken_for_somebody_elses_update(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for _ in range(120):
        loss_of(model).backward()
    optimizer.step()

    assert monitor.flush()
    assert signals(monitor)["gradient"] is True
    assert caplog.records == []
