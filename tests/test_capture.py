"""What is captured, held against plain autograd in float64 and against the weights themselves."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradexporter.monitor import Monitor
from gradexporter.records import FindingKind, LayerStats, StepReport


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(seed: int = 1, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def reported(monitor: Monitor) -> StepReport:
    assert monitor.flush()
    report = monitor.report
    assert report is not None
    return report


def layer(report: StepReport, name: str) -> LayerStats:
    return next(row for row in report.layers.rows() if row.layer == name)


def reference(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Gradients of a float64 copy of the model, one flat tensor a layer."""
    twin = copy.deepcopy(model).double()
    loss_of(twin).backward()
    return {
        name: torch.cat([p.grad.flatten() for p in module.parameters(recurse=False)])
        for name, module in twin.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def test_gradients_of_each_layer_equal_those_of_autograd_in_float64(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    expected = reference(model, lambda twin: cross_entropy(twin, x.double(), y))
    monitor = watch(model, optimizer)

    loss = monitor.observe(cross_entropy(model, x, y))
    loss.backward()
    optimizer.step()
    report = reported(monitor)

    assert report.step == 1
    assert report.applied is True
    assert report.loss == pytest.approx(loss.item())
    assert report.learning_rate == 0.1
    assert report.gradient_norm == pytest.approx(torch.cat(list(expected.values())).norm().item(), rel=1e-5)
    for name, gradient in expected.items():
        row = layer(report, name)
        assert row.gradient_norm == pytest.approx(gradient.norm().item(), rel=1e-5)
        assert row.gradient_max_abs == pytest.approx(gradient.abs().max().item(), rel=1e-5)
        assert row.gradient_nonfinite == 0


@pytest.mark.matrix("clip")
def test_the_gradient_is_the_one_before_clipping_and_the_clip_factor_says_what_clipping_did(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    monitor = watch(model, optimizer)

    cross_entropy(model, x, y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.clip_factor == pytest.approx(0.01 / norm.item(), rel=1e-3)
    assert monitor.snapshot is not None
    assert monitor.snapshot.clipped_steps == 1


def test_a_gradient_that_nobody_clipped_has_clip_factor_one(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    cross_entropy(model, *data()).backward()
    optimizer.step()

    assert reported(monitor).clip_factor == 1.0


@pytest.mark.matrix("accumulation")
def test_accumulated_micro_batches_are_one_step_with_the_gradient_of_the_update(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(rows=32)
    expected = reference(model, lambda twin: cross_entropy(twin, x.double(), y))
    monitor = watch(model, optimizer)

    losses = []
    for part_x, part_y in zip(x.split(8), y.split(8), strict=True):
        loss = monitor.observe(cross_entropy(model, part_x, part_y))
        (loss / 4).backward()
        losses.append(loss.item())
    optimizer.step()
    report = reported(monitor)

    assert report.step == 1
    assert report.gradient_norm == pytest.approx(torch.cat(list(expected.values())).norm().item(), rel=1e-5)
    assert report.loss == pytest.approx(sum(losses) / 4)
    outputs = torch.cat([nn.functional.linear(x, w.detach(), b.detach()) for w, b in [tuple(net()[0].parameters())]])
    assert layer(report, "0").activation_max_abs == pytest.approx(outputs.abs().max().item(), rel=1e-6)
    assert layer(report, "0").activation_rms == pytest.approx(outputs.square().mean().sqrt().item(), rel=1e-5)


def test_activations_are_measured_in_full(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = 0
        outputs = model[0](x)
    monitor = watch(model, optimizer)

    cross_entropy(model, x, y).backward()
    optimizer.step()
    row = layer(reported(monitor), "0")

    assert row.activation_rms == pytest.approx(outputs.square().mean().sqrt().item(), rel=1e-6)
    assert row.activation_max_abs == outputs.abs().max().item()
    assert row.activation_zero_ratio == 1 / 8
    assert row.activation_nonfinite == 0


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="sgd"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), id="sgd with decay"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), id="momentum"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), id="nesterov"),
        pytest.param(lambda p: torch.optim.Adam(p, lr=0.01), id="adam"),
        pytest.param(lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), id="amsgrad"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0), id="adamw"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.0), id="tensor rate"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, fused=True), id="fused"),
    ],
)
def test_the_update_ratio_is_that_of_the_weights_themselves(
    watch: Callable[..., Monitor], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = net()
    optimizer = make(model.parameters())
    monitor = watch(model, optimizer)

    for step in range(5):
        before = [parameter.detach().double().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        cross_entropy(model, *data(step)).backward()
        optimizer.step()
        report = reported(monitor)
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
        scale = torch.cat([b.flatten() for b in before]).norm().item()

        tolerance = 1e-3 if step else 0.1  # before the first step nobody has measured the parameters
        assert report.update_ratio == pytest.approx(moved.norm().item() / scale, rel=tolerance)


def test_an_optimizer_whose_update_cannot_be_rebuilt_has_none_and_says_so(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    for _ in range(2):
        cross_entropy(model, *data()).backward()
        optimizer.step()
    report = reported(monitor)

    assert report.update_ratio is None
    assert report.second_moment_max_abs is not None
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["update_ratio"] is False


def test_optimizer_state_and_parameters_are_those_after_the_update(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    cross_entropy(model, *data()).backward()
    optimizer.step()
    report = reported(monitor)

    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    moments = [optimizer.state[p] for p in model.parameters()]
    assert report.parameter_norm == pytest.approx(parameters.norm().item(), rel=1e-6)
    assert report.parameter_max_abs == parameters.abs().max().item()
    assert report.momentum_max_abs == max(m["exp_avg"].abs().max().item() for m in moments)
    assert report.second_moment_max_abs == max(m["exp_avg_sq"].max().item() for m in moments)
    state = optimizer.state[model[2].weight]
    assert layer(report, "2").second_moment_max_abs >= state["exp_avg_sq"].max().item()


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_loss_scaler_are_divided_by_the_scale(watch: Callable[..., Monitor], fused: bool) -> None:
    model = net()
    x, y = data()
    expected = reference(model, lambda twin: cross_entropy(twin, x.double(), y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = watch(model, optimizer, scaler)

    scaler.scale(cross_entropy(model, x, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    report = reported(monitor)

    assert report.loss_scale == 1024.0
    assert report.gradient_norm == pytest.approx(torch.cat(list(expected.values())).norm().item(), rel=1e-5)
    assert report.clip_factor in (None, 1.0)


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_the_scaler_skips_is_a_skipped_step(watch: Callable[..., Monitor], fused: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = watch(model, optimizer)  # nobody told us of the scaler
    x, y = data()

    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        report = reported(monitor)
        if factor == math.inf:
            assert report.applied is False
            assert report.nonfinite["gradient"] > 0
            assert report.update_ratio is None

    assert report.step == 3
    assert report.loss_scale == 512.0
    assert monitor.snapshot is not None
    assert (monitor.snapshot.steps_applied, monitor.snapshot.steps_skipped) == (2, 1)


@pytest.mark.matrix("clip")
def test_gradients_unscaled_and_clipped_by_the_user_keep_their_size(watch: Callable[..., Monitor]) -> None:
    model = net()
    x, y = data()
    expected = torch.cat(list(reference(model, lambda twin: cross_entropy(twin, x.double(), y)).values())).norm().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = watch(model, optimizer, scaler)

    scaler.scale(cross_entropy(model, x, y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(expected, rel=1e-5)
    assert report.clip_factor == pytest.approx(0.01 / expected, rel=1e-3)


@pytest.mark.matrix("overflow")
def test_a_norm_that_would_overflow_float32_is_finite(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)

    (model(torch.ones(1, 4)).sum() * 1e25).backward()
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(1e25 * math.sqrt(5), rel=1e-5)
    assert report.nonfinite["gradient"] == 0
    assert FindingKind.OVERFLOW_IMMINENT in {finding.kind for finding in report.findings}
    assert FindingKind.NONFINITE not in {finding.kind for finding in report.findings}


def test_a_norm_whose_squares_underflow_is_not_zero(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)

    (model(torch.ones(1, 4)).sum() * 1e-30).backward()
    optimizer.step()

    assert reported(monitor).gradient_norm == pytest.approx(1e-30 * math.sqrt(5), rel=1e-5, abs=0.0)


def test_non_finite_elements_are_counted_where_they_are(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    cross_entropy(model, *data()).backward()
    model[2].weight.register_hook(lambda grad: None)
    optimizer.zero_grad()
    loss = cross_entropy(model, *data())
    model[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), math.nan))
    loss.backward()
    optimizer.step()
    report = reported(monitor)

    assert layer(report, "0").gradient_nonfinite == 0
    assert layer(report, "2").gradient_nonfinite == 8
    assert report.gradient_norm is not None
    assert math.isnan(report.gradient_norm)
    assert report.first_nonfinite is not None
    assert (report.first_nonfinite.layer, report.first_nonfinite.quantity) == ("2", "gradient")


@pytest.mark.matrix("dtypes")
def test_half_precision_is_widened_before_it_is_squared(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(64, 64, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)

    output = model(torch.full((1, 64), 0.5, dtype=torch.float16))
    (output * 600).sum().backward()
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(300.0 * 64, rel=1e-3)
    assert report.dtype_max == 65504.0


@pytest.mark.matrix("parameters")
def test_frozen_and_unused_layers_have_no_gradient_rather_than_zero(watch: Callable[..., Monitor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.used = nn.Linear(6, 3)
            self.unused = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    cross_entropy(model, *data()).backward()
    optimizer.step()
    report = reported(monitor)

    assert layer(report, "frozen").gradient_norm is None
    assert layer(report, "frozen").activation_rms is not None
    assert layer(report, "unused").gradient_norm is None
    assert layer(report, "unused").activation_rms is None
    assert layer(report, "used").gradient_norm is not None


@pytest.mark.matrix("parameters")
def test_tied_weights_are_counted_once_under_the_first_name(watch: Callable[..., Monitor]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    model(data()[0]).square().mean().backward()
    norm = model.first.weight.grad.norm().item()
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(norm, rel=1e-6)
    assert layer(report, "first").gradient_norm == pytest.approx(norm, rel=1e-6)
    assert layer(report, "second").gradient_norm is None
    assert layer(report, "second").activation_rms is not None


@pytest.mark.matrix("evaluation")
def test_a_validation_forward_is_not_measured(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    x, y = data()

    cross_entropy(model, x, y).backward()
    model.eval()
    with torch.no_grad():
        model(x * 1e6)
    model.train()
    with torch.no_grad():
        model(x * 1e6)
    optimizer.step()
    report = reported(monitor)

    assert report.activation_max_abs is not None
    assert report.activation_max_abs < 100
    assert report.input_max_abs == x.abs().max().item()


@pytest.mark.matrix("interrupted")
def test_a_backward_that_fails_midway_does_not_blind_the_next_one(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    x, y = data()

    broken = model[0](x)
    broken.register_hook(lambda grad: (_ for _ in ()).throw(MemoryError("as if")))
    with pytest.raises(MemoryError):
        nn.functional.cross_entropy(model[2](torch.relu(broken)), y).backward()
    optimizer.zero_grad()
    expected = reference(model, lambda twin: cross_entropy(twin, x.double(), y))
    cross_entropy(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    report = reported(monitor)

    assert report.step == 1
    assert report.gradient_norm == pytest.approx(torch.cat(list(expected.values())).norm().item(), rel=1e-5)


def test_a_loss_observed_after_the_update_belongs_to_the_step_just_closed(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    for value in (3.0, 5.0):
        cross_entropy(model, *data()).backward()
        optimizer.step()
        monitor.observe(value)
        monitor.observe(torch.tensor([value + 2]))
        assert reported(monitor).loss == value + 1


def test_the_loss_is_not_the_users_tensor_and_may_change_in_place(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    loss = cross_entropy(model, *data())
    before = loss.item()
    assert monitor.observe(loss) is loss
    loss.backward()
    with torch.no_grad():
        loss.mul_(1000)
    optimizer.step()

    assert reported(monitor).loss == pytest.approx(before)


def test_a_step_is_numbered_from_where_the_run_resumes(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, start_step=501)

    cross_entropy(model, *data()).backward()
    optimizer.step()

    assert reported(monitor).step == 501


def test_sampled_statistics_come_every_nth_step_and_the_rest_at_every_one(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, activation_every=3, state_every=2)

    seen = []
    for step in range(6):
        cross_entropy(model, *data(step)).backward()
        optimizer.step()
        report = reported(monitor)
        assert report.gradient_norm is not None
        assert layer(report, "0").activation_nonfinite == 0
        seen.append((report.activation_max_abs is not None, report.parameter_max_abs is not None))

    assert [full for full, _ in seen] == [True, False, False, True, False, False]
    assert [full for _, full in seen] == [True, False, True, False, True, False]


@pytest.mark.matrix("copies")
def test_copies_of_a_watched_model_are_free_of_it(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    cross_entropy(model, *data()).backward()
    optimizer.step()
    report = reported(monitor)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = torch.optim.SGD(twin.parameters(), lr=0.1)
        cross_entropy(twin, *data()).backward()
        other.step()

    assert monitor.flush()
    assert monitor.report is report


@pytest.mark.matrix("outputs")
def test_outputs_of_every_kind_of_structure_are_measured(watch: Callable[..., Monitor]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            return {"a": (x * self.weight, None), "b": [torch.ones(2, dtype=torch.long), {"c": x * 2}]}

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    model(torch.full((3,), 4.0))["a"][0].sum().backward()
    optimizer.step()
    row = layer(reported(monitor), "(root)")

    assert row.activation_max_abs == 8.0
    assert row.gradient_norm == pytest.approx(4.0 * math.sqrt(3))


@pytest.mark.matrix("optimizers")
def test_several_optimizers_make_steps_of_their_own(watch: Callable[..., Monitor]) -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.2)
    monitor = watch(model, [first, second])

    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        cross_entropy(model, *data()).backward()
        first.step()
        second.step()
    assert monitor.flush()

    snapshot = monitor.snapshot
    assert snapshot is not None
    assert [report.step for report in snapshot.reports] == [3, 4]
    assert [report.layers.names for report in snapshot.reports] == [("0",), ("2",)]
    assert snapshot.layers.names == ("0", "2")
    assert [report.learning_rate for report in snapshot.reports] == [0.1, 0.2]


def test_a_gradient_set_by_hand_is_measured_at_the_update(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    model.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == 5.0
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["pre_clip"] is False


@pytest.mark.matrix("optimizers")
def test_a_group_added_later_is_measured_too(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    cross_entropy(model, *data()).backward()
    optimizer.step()
    assert layer(reported(monitor), "0").gradient_norm is None

    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model, *data()).backward()
        optimizer.step()
    report = reported(monitor)

    assert layer(report, "0").gradient_norm is not None
    assert report.group_learning_rates == (0.1, 0.01)


@pytest.mark.matrix("closure")
def test_a_closure_is_one_step(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, *data())
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    report = reported(monitor)

    assert report.step == 2
    assert report.gradient_norm is not None
