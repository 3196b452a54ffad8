"""Clipping: our drop-in is torch's bit for bit, and whoever clips, the gradient before it is what is published."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradexporter
from gradexporter.monitor import Monitor
from tests.classifier import expected, layer, loss_of, net, reported, signal


def clipped_steps(monitor: Monitor) -> int:
    assert monitor.flush()
    assert monitor.snapshot is not None
    return monitor.snapshot.clipped_steps


# -- the same as torch's ---------------------------------------------------------------------------


def parameters(*gradients: Tensor | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = None if gradient is None else gradient.clone()
        made.append(parameter)
    return made


def gradients_of(kind: str) -> list[Tensor | None]:
    torch.manual_seed(1)
    plain: list[Tensor | None] = [torch.randn(5, 7), torch.randn(3), torch.randn(65, 3, 2), torch.randn(())]
    return {
        "plain": plain,
        "float64": [torch.randn(4, 4, dtype=torch.float64), torch.randn(9, dtype=torch.float64)],
        "mixed": [*plain, torch.randn(8, dtype=torch.float64), torch.randn(8).bfloat16(), torch.randn(8).half()],
        "bfloat16": [torch.randn(5, 7).bfloat16(), torch.randn(3).bfloat16()],
        "overflowing half": [torch.full((64, 64), 3e4).half(), torch.randn(3).half()],
        "some without": [None, torch.randn(5), None, torch.randn(2, 2)],
        "none": [None, None],
        "empty": [],
        "without elements": [torch.randn(0, 3), torch.randn(4)],
        "nan": [torch.randn(5), torch.tensor([1.0, math.nan]), torch.randn(3)],
        "inf": [torch.randn(5), torch.tensor([1.0, math.inf]), torch.randn(3)],
        "norm overflows": [torch.full((4,), 1e25), torch.randn(3)],
        "total overflows": [torch.full((1,), 3e38), torch.full((1,), 3e38)],
        "tiny": [torch.full((4,), 1e-30), torch.full((3,), 1e-42)],
        "zero": [torch.zeros(4), torch.zeros(2, 2)],
        "complex": [torch.randn(4, dtype=torch.complex64), torch.randn(3)],
        "transposed": [torch.randn(5, 7).t(), torch.randn(8)[::2]],
        "sparse": [torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True), torch.randn(3)],
        "with a graph": [torch.randn(4, requires_grad=True) * 2, torch.randn(3)],
    }[kind]


KINDS = [
    "plain",
    "float64",
    "mixed",
    "bfloat16",
    "overflowing half",
    "some without",
    "none",
    "empty",
    "without elements",
    "nan",
    "inf",
    "norm overflows",
    "total overflows",
    "tiny",
    "zero",
    "complex",
    "transposed",
    "sparse",
    "with a graph",
]


def outcome(clip: Callable[..., Tensor], held: list[nn.Parameter], *args: Any) -> tuple[Any, ...]:
    """Everything that a clip leaves behind: result or error, gradients bit for bit, warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            total = clip(held, *args)
            result: Any = (bits(total), total.requires_grad, total.device)
        except Exception as error:
            result = (type(error), str(error))
    return result, [bits(parameter.grad) for parameter in held], [str(one.message) for one in caught]


def bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


WAYS = [
    (max_norm, norm_type, raises, foreach)
    for norm_type in (2.0, 2, 1, 0.5, math.inf, "inf")
    for foreach in (None, True, False)
    for raises in (False, True)
    for max_norm in ((1e-3, 1e9) if norm_type == 2.0 else (1e-3,))
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_clip_is_torchs_bit_for_bit(kind: str) -> None:
    for way in WAYS[::3]:
        theirs = outcome(nn.utils.clip_grad_norm_, parameters(*gradients_of(kind)), *way)
        assert outcome(gradexporter.clip_grad_norm_, parameters(*gradients_of(kind)), *way) == theirs


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("none", "empty")])
def test_the_clip_is_torchs_bit_for_bit_where_a_monitor_takes_the_norms(
    watch: Callable[..., Monitor], kind: str
) -> None:
    model = nn.ParameterList(parameters(*gradients_of(kind)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch(model, optimizer, state_every=1000)
    optimizer.zero_grad()
    optimizer.step()  # the first one is measured in full
    for way in WAYS:
        theirs = outcome(nn.utils.clip_grad_norm_, parameters(*gradients_of(kind)), *way)
        for parameter, gradient in zip(model.parameters(), gradients_of(kind), strict=True):
            parameter.grad = gradient
        assert outcome(gradexporter.clip_grad_norm_, list(model.parameters()), *way) == theirs
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("foreach", [None, False])
def test_a_watched_loop_that_clips_with_ours_is_that_of_torchs_bit_for_bit(
    watch: Callable[..., Monitor], foreach: bool | None
) -> None:
    def trained(clip: Callable[..., Tensor], watched: bool) -> list[Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if watched:
            watch(model, optimizer, state_every=3)
        totals = []
        for step in range(12):
            optimizer.zero_grad()
            (loss_of(model, step) * (math.inf if step == 7 else 1e22 if step == 9 else 1)).backward()
            totals.append(bits(clip(model.parameters(), 0.5, foreach=foreach)))
            if step != 7:
                optimizer.step()
        return [*totals, *map(bits, model.parameters())]

    assert trained(gradexporter.clip_grad_norm_, True) == trained(nn.utils.clip_grad_norm_, False)


def test_a_single_tensor_and_a_generator_are_taken_as_torch_takes_them() -> None:
    for form in (lambda held: held[0], lambda held: (p for p in held), lambda held: tuple(held)):
        ours, theirs = parameters(*gradients_of("plain")), parameters(*gradients_of("plain"))
        assert torch.equal(gradexporter.clip_grad_norm_(form(ours), 0.1), nn.utils.clip_grad_norm_(form(theirs), 0.1))
        assert [bits(p.grad) for p in ours] == [bits(p.grad) for p in theirs]


def test_an_empty_generator_is_warned_of_where_it_was_passed() -> None:
    with pytest.warns(UserWarning, match="empty generator") as caught:
        gradexporter.clip_grad_norm_((p for p in []), 1.0)

    assert [one.filename for one in caught] == [__file__]


def test_the_signature_is_torchs() -> None:
    ours = inspect.signature(gradexporter.clip_grad_norm_).parameters.values()
    theirs = inspect.signature(nn.utils.clip_grad_norm_).parameters.values()

    assert [(one.name, one.default, one.kind) for one in ours] == [(one.name, one.default, one.kind) for one in theirs]


def test_a_torch_that_clips_otherwise_is_left_to_clip_alone(
    watch: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(held: Any, max_norm: float, *args: Any) -> Tensor:
        return original(held, max_norm * (1 + 1e-6), *args)

    original = nn.utils.clip_grad_norm_
    monkeypatch.setattr("gradexporter.clip._agrees", {})
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", another)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    for step in range(3):
        norms = expected(model, step)
        train(model, optimizer, step)

        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-5)
        assert report.gradient_max_abs is not None


# -- the norms that it computes are kept -------------------------------------------------------------


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    clip: Callable[..., Any] = gradexporter.clip_grad_norm_,
    max_norm: float = 0.1,
) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    clip(model.parameters(), max_norm)
    optimizer.step()


def passes(run: Callable[[], None]) -> int:
    """Reductions of all gradients together that happen during ``run``, torch's own clip included."""
    with torch.profiler.profile() as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_foreach_norm")


@pytest.mark.matrix("our clip")
def test_from_the_second_update_on_the_clip_brings_the_norms_of_all_layers(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, activation_every=1000, state_every=5, kernels="stock")  # whose calls show
    monitor.observe(None, inputs=torch.ones(1))  # from now on the model's own inputs are not measured

    seen = []
    for step in range(7):
        norms = expected(model, step)
        counted = passes(lambda step=step: train(model, optimizer, step))
        report = reported(monitor)
        for name, norm in norms.items():
            found = report.gradient_norm if name == "" else layer(report, name).gradient_norm
            assert found == pytest.approx(norm, rel=1e-5)
        assert report.nonfinite["gradient"] == 0
        assert layer(report, "0").gradient_nonfinite == 0
        assert report.clip_factor == pytest.approx(min(1.0, 0.1 / norms[""]), rel=1e-3)
        full = report.gradient_max_abs is not None
        seen.append((full, counted))

    # The clip's own reduction and the parameters read again; a full step adds gradients, parameters and updates.
    assert seen[1:] == [(False, 2), (False, 2), (False, 2), (False, 2), (True, 5), (False, 2)]
    assert signal(monitor, "pre_clip") is True
    assert clipped_steps(monitor) == 7
    assert monitor.snapshot is not None
    assert monitor.snapshot.readings[0].gradient_max_abs is not None  # the last reading stands


@pytest.mark.matrix("our clip")
def test_the_culprit_is_found_before_clipping_spreads_it(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, state_every=1000)
    for step in range(3):
        train(model, optimizer, step)
    handle = model[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), math.nan))
    train(model, optimizer, 3)
    handle.remove()
    report = reported(monitor)

    assert all(torch.isnan(parameter).all() for parameter in model.parameters())  # what clipping by NaN does
    assert layer(report, "0").gradient_nonfinite == 0
    assert layer(report, "2").gradient_nonfinite == 8
    assert layer(report, "2").gradient_max_abs is not None
    assert report.first_nonfinite is not None
    assert (report.first_nonfinite.layer, report.first_nonfinite.quantity) == ("2", "gradient")


@pytest.mark.matrix("our clip")
def test_a_norm_that_overflows_is_finite_and_its_clip_factor_is_zero(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, state_every=1000)
    for factor in (1.0, 1.0, 1e25):
        optimizer.zero_grad()
        (loss_of(model) * factor).backward()
        gradexporter.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(1e25 * expected(model)[""], rel=1e-5)
    assert report.nonfinite["gradient"] == 0
    assert report.clip_factor == 0.0
    assert clipped_steps(monitor) == 1


@pytest.mark.matrix("our clip")
def test_a_clip_that_does_not_come_is_made_up_for_at_the_update(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    available = []
    for step, clips in enumerate([True, True, False, False, True, True]):
        norms = expected(model, step)
        train(model, optimizer, step, gradexporter.clip_grad_norm_ if clips else lambda *_: None, 1e9)
        assert reported(monitor).gradient_norm == pytest.approx(norms[""], rel=1e-5)
        available.append(signal(monitor, "pre_clip"))

    assert available == [True, True, False, True, True, True]


@pytest.mark.matrix("our clip")
def test_accumulation_of_any_length_is_measured_before_our_clip(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    for backwards in (3, 3, 1, 2, 5, 1):
        optimizer.zero_grad()
        for step in range(backwards):
            loss_of(model, step).backward()
        norms = [parameter.grad.double().norm().item() for parameter in model.parameters()]
        gradexporter.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(math.hypot(*norms), rel=1e-5)
        assert report.clip_factor == pytest.approx(0.01 / math.hypot(*norms), rel=1e-3)
        assert signal(monitor, "pre_clip") is True


@pytest.mark.matrix("our clip")
@pytest.mark.parametrize(
    "clip",
    [
        pytest.param(lambda ps: gradexporter.clip_grad_norm_(ps, 0.1, norm_type=math.inf), id="another norm"),
        pytest.param(lambda ps: gradexporter.clip_grad_norm_(list(ps)[:2], 0.1), id="a part"),
        pytest.param(lambda ps: [gradexporter.clip_grad_norm_(p, 0.05) for p in ps], id="one by one"),
    ],
)
def test_a_clip_whose_norms_do_not_serve_is_measured_before_it(
    watch: Callable[..., Monitor], clip: Callable[[Any], Any]
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    for step in range(6):
        norms = expected(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 3:  # also right after a clip that served
            gradexporter.clip_grad_norm_(model.parameters(), 1e9)
        clip(model.parameters())
        optimizer.step()

        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-5)
        assert layer(report, "2").gradient_norm == pytest.approx(norms["2"], rel=1e-5)
        assert signal(monitor, "pre_clip") is True


@pytest.mark.matrix("our clip")
def test_half_precision_is_not_taken_from_the_clip(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(64, 64, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, state_every=1000)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.full((1, 64), 0.5, dtype=torch.float16)) * 4000).sum().backward()
        gradexporter.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report = reported(monitor)

        assert report.gradient_norm == pytest.approx(2000.0 * 64, rel=1e-3)  # beyond what half precision holds
        assert report.nonfinite["gradient"] == 0
        assert report.clip_factor == 0.0


@pytest.mark.matrix("our clip")
def test_a_gradient_of_zero_and_one_whose_squares_underflow_are_told_apart(watch: Callable[..., Monitor]) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, state_every=1000)
    for _ in range(2):
        for at, size in enumerate((0.0, 1e-30, 1.0)):
            model[at].weight.grad = torch.full((2, 2), size)
        gradexporter.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report = reported(monitor)

    assert layer(report, "0").gradient_norm == 0.0
    assert layer(report, "1").gradient_norm == pytest.approx(2e-30, rel=1e-5, abs=0.0)
    assert report.clip_factor == pytest.approx(0.5, rel=1e-5)


@pytest.mark.matrix("our clip")
def test_one_clip_serves_several_optimizers_each_with_its_share(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (2, 0)]
    monitor = watch(model, optimizers, state_every=1000)
    for step in range(3):
        norms = expected(model, step)
        loss_of(model, step).backward()
        gradexporter.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert monitor.flush()
        assert monitor.snapshot is not None
        found = [report.gradient_norm for report in monitor.snapshot.reports]
        assert found == pytest.approx([norms["2"], norms["0"]], rel=1e-5)


def test_a_clip_that_is_compiled_with_the_step_is_torchs(watch: Callable[..., Monitor]) -> None:
    def clipped(clip: Callable[..., Tensor]) -> list[Any]:
        held = parameters(*gradients_of("plain"))

        def run() -> Tensor:
            return clip(held, 0.1)

        return [bits(torch.compile(run, backend="eager", fullgraph=True)()), *(bits(p.grad) for p in held)]

    assert clipped(gradexporter.clip_grad_norm_) == clipped(nn.utils.clip_grad_norm_)


# -- whoever clips -----------------------------------------------------------------------------------


def by_value(ps: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(ps, 0.02)


def by_layer(ps: list[nn.Parameter]) -> None:
    for at in range(0, len(ps), 2):
        nn.utils.clip_grad_norm_(ps[at : at + 2], 0.1)


def by_parameter_data(ps: list[nn.Parameter]) -> None:
    for p in ps:
        assert p.grad is not None
        p.grad.data.clamp_(-0.02, 0.02)


def adaptive(ps: list[nn.Parameter]) -> None:
    for p in ps:
        assert p.grad is not None
        limit = 0.05 * p.detach().norm().clamp(min=1e-3)
        p.grad = p.grad * (limit / p.grad.norm()).clamp(max=1.0)


def by_hand(ps: list[nn.Parameter]) -> None:
    total = torch.stack([p.grad.norm() for p in ps if p.grad is not None]).norm()
    for p in ps:
        assert p.grad is not None
        p.grad.data.mul_(min(1.0, 0.1 / total.item()))


@pytest.mark.matrix("clip")
@pytest.mark.parametrize("clip", [by_value, by_layer, by_parameter_data, adaptive])
@pytest.mark.parametrize("unlike", [False, True])
def test_clipping_that_is_not_one_factor_has_none_and_counts_where_it_made_something_smaller(
    watch: Callable[..., Monitor], clip: Callable[[list[nn.Parameter]], None], unlike: bool
) -> None:
    model = net()
    if unlike:  # what is clipped is where nobody looks first: in the largest parameter
        model[0].weight.register_hook(lambda gradient: gradient * 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    clipped = 0
    for step in range(6):
        loss_of(model, step).backward()
        before = [p.grad.clone() for p in model.parameters()]
        clip(list(model.parameters()))
        clipped += any(not torch.equal(b, p.grad) for b, p in zip(before, model.parameters(), strict=True))
        optimizer.step()
        optimizer.zero_grad()

        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(torch.cat([b.flatten() for b in before]).norm().item(), rel=1e-5)
        assert report.clip_factor is None

    assert clipped == 6
    assert clipped_steps(monitor) == 6
    assert signal(monitor, "loss_scale") is None


@pytest.mark.matrix("clip")
@pytest.mark.parametrize("clip", [by_value, by_layer, by_parameter_data, adaptive, by_hand])
def test_clipping_that_leaves_everything_alone_is_factor_one(
    watch: Callable[..., Monitor], clip: Callable[[list[nn.Parameter]], None]
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    for step in range(3):
        (loss_of(model, step) * 1e-3).backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        assert reported(monitor).clip_factor == 1.0

    assert clipped_steps(monitor) == 0


@pytest.mark.matrix("clip")
@pytest.mark.parametrize(
    "clip", [by_hand, lambda ps: nn.utils.clip_grad_norm_(ps, 0.1), lambda ps: gradexporter.clip_grad_norm_(ps, 0.1)]
)
def test_clipping_by_one_factor_is_that_factor_and_never_taken_for_a_scale(
    watch: Callable[..., Monitor], clip: Callable[[list[nn.Parameter]], Any]
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer, state_every=7)
    for step in range(24):
        norm = expected(model, step % 2)[""]
        loss_of(model, step % 2).backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(norm, rel=1e-4)
        assert report.clip_factor == pytest.approx(0.1 / norm, rel=1e-3)

    assert clipped_steps(monitor) == 24
    assert signal(monitor, "pre_clip") is True
    assert signal(monitor, "loss_scale") is None


@pytest.mark.matrix("clip")
def test_the_same_batch_clipped_alike_at_every_step_is_not_taken_for_a_scale(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    norm = expected(model)[""]
    for _ in range(8):
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm / 4)
        optimizer.step()
        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert reported(monitor).clip_factor == pytest.approx(0.25, rel=1e-4)


@pytest.mark.matrix("clip")
def test_a_parameter_whose_gradient_is_zero_says_nothing_of_clipping_and_another_does(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    model[2].bias.register_hook(torch.zeros_like)  # the smallest one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    for step in range(3):
        loss_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
        optimizer.step()
        optimizer.zero_grad()

        assert reported(monitor).clip_factor == pytest.approx(0.01 / norm, rel=1e-3)


@pytest.mark.matrix("clip")
def test_clipping_by_a_norm_that_is_not_finite_names_the_layer_that_brought_it(watch: Callable[..., Monitor]) -> None:
    for value, spread in ((math.nan, math.nan), (math.inf, 0.0)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = watch(model, optimizer)
        for step in range(3):
            loss = loss_of(model, step)
            if step == 2:
                model[2].weight.register_hook(lambda g, value=value: g.index_fill(0, torch.tensor([0]), value))
                loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        report = reported(monitor)

        assert [row.gradient_nonfinite for row in report.layers.rows()] == [0, 8]
        assert report.first_nonfinite is not None
        assert (report.first_nonfinite.layer, report.first_nonfinite.quantity) == ("2", "gradient")
        assert report.clip_factor == pytest.approx(spread, nan_ok=True)


@pytest.mark.matrix("clip")
def test_a_closure_that_clips_has_its_factor(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, state_every=1000)
    for step in range(4):
        norm = expected(model, step)[""]

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            if step != 3:  # and once it does not come
                gradexporter.clip_grad_norm_(model.parameters(), 0.01)
            return loss

        optimizer.step(closure)
        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert report.clip_factor == (None if step == 3 else pytest.approx(0.01 / norm, rel=1e-3))

    assert signal(monitor, "pre_clip") is False


# -- accumulation -------------------------------------------------------------------------------------


@pytest.mark.matrix("accumulation")
def test_a_short_last_accumulation_that_is_clipped_is_measured_before_it_from_the_second_epoch_on(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, state_every=1000)
    for epoch in range(3):
        for backwards in (4, 4, 4, 2):
            optimizer.zero_grad()
            for step in range(backwards):
                loss_of(model, step).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
            optimizer.step()
            report = reported(monitor)
            if (epoch, backwards) == (0, 2):
                assert signal(monitor, "pre_clip") is False
                assert report.gradient_norm == pytest.approx(0.01, rel=1e-3)
                assert report.clip_factor is None
            else:
                assert signal(monitor, "pre_clip") is True
                assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
                assert report.clip_factor == pytest.approx(0.01 / norm, rel=1e-3)


@pytest.mark.matrix("accumulation")
def test_a_short_last_accumulation_that_nobody_changes_is_known_to_be_unclipped(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for backwards in (3, 3, 1, 3):
        optimizer.zero_grad()
        for step in range(backwards):
            loss_of(model, step).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()

        assert reported(monitor).gradient_norm == pytest.approx(norm, rel=1e-5)
        assert signal(monitor, "pre_clip") is True


@pytest.mark.matrix("accumulation")
def test_losses_of_micro_batches_are_averaged_whatever_their_number(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for backwards in (3, 1, 2):
        optimizer.zero_grad()
        losses = []
        for step in range(backwards):
            loss = monitor.observe(loss_of(model, step))
            (loss / backwards).backward()
            losses.append(loss.item())
        optimizer.step()

        assert reported(monitor).loss == pytest.approx(sum(losses) / backwards)


@pytest.mark.matrix("our clip")
def test_gradients_that_the_loop_changes_before_our_clip_are_measured_before_that(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    told = []
    for step in range(5):
        norms = expected(model, seed=step)
        optimizer.zero_grad()
        loss_of(model, seed=step).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        gradexporter.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report = reported(monitor)
        right = report.gradient_norm == pytest.approx(norms[""], rel=1e-5)
        told.append((right, signal(monitor, "pre_clip")))

    assert told == [(True, True), (False, False), (True, True), (True, True), (True, True)]


@pytest.mark.matrix("our clip")
def test_a_scale_that_the_loop_divides_out_before_our_clip_is_not_part_of_the_norm(
    watch: Callable[..., Monitor],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    for step in range(6):
        norms = expected(model, seed=step)
        optimizer.zero_grad()
        (loss_of(model, seed=step) * 1024).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(1024)
        gradexporter.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step:
            assert reported(monitor).gradient_norm == pytest.approx(norms[""], rel=1e-5)
