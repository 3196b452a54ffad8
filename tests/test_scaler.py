"""Loss scaling, by torch's scaler and by hand: gradients without the scale, and what becomes of skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import gradexporter
from gradexporter.monitor import Monitor
from gradexporter.records import FindingKind, Quantity
from tests.classifier import expected, layer, loss_of, net, reported, signal


def steps(monitor: Monitor) -> tuple[int, int, int]:
    """Applied, skipped, clipped."""
    assert monitor.flush()
    snapshot = monitor.snapshot
    assert snapshot is not None
    return snapshot.steps_applied, snapshot.steps_skipped, snapshot.clipped_steps


class NeverAsked(GradScaler):
    """``get_scale`` would wait for the device."""

    def get_scale(self) -> float:
        raise AssertionError("the scale was asked for")


@pytest.fixture(params=["plain", "fused"])
def adam(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW as the scaler unscales for it, and as it unscales itself."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=request.param == "fused")


Adam = Callable[[Any], torch.optim.Optimizer]


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("told", [True, False], ids=["passed", "not passed"])
def test_under_autocast_to_half_precision_gradients_are_those_without_the_scale(
    watch: Callable[..., Monitor], adam: Adam, told: bool
) -> None:
    model = net()
    optimizer = adam(model.parameters())
    scaler = NeverAsked("cpu", init_scale=4096.0, growth_interval=2)
    monitor = watch(model, optimizer, scaler if told else None, state_every=2)
    for step in range(5):
        norms = expected(model, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        report = reported(monitor)
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-2)
        assert layer(report, "0").gradient_norm == pytest.approx(norms["0"], rel=1e-2)
        assert report.loss_scale == 4096.0 * 2 ** (step // 2)
        assert report.clip_factor == 1.0

    assert signal(monitor, "loss_scale") is True
    assert steps(monitor) == (5, 0, 0)


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, gradexporter.clip_grad_norm_], ids=["torch's", "ours"])
@pytest.mark.parametrize("micro_batches", [(1, 1, 1, 1, 1, 1), (3, 3, 3, 2, 3, 1)], ids=["single", "accumulated"])
def test_what_is_unscaled_and_clipped_by_the_user_keeps_its_size_also_where_the_scaler_skips(
    watch: Callable[..., Monitor], adam: Adam, clip: Callable[..., Tensor], micro_batches: tuple[int, ...]
) -> None:
    model = net()
    optimizer = adam(model.parameters())
    scaler = NeverAsked("cpu", init_scale=1024.0)
    monitor = watch(model, optimizer, state_every=1000)
    skipping = {2, 3}
    for step, parts in enumerate(micro_batches):
        optimizer.zero_grad()
        for part in range(parts):
            loss = loss_of(model, step * 10 + part) / parts
            scaler.scale(loss * math.inf if step in skipping else loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(model.parameters(), 0.01).item()
        scaler.step(optimizer)
        scaler.update()

        report = reported(monitor)
        if step in skipping:
            assert report.applied is False
            assert report.nonfinite["gradient"] > 0
            assert report.state is not None
            assert report.first_nonfinite is None
        else:
            assert report.applied is True
            assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
            assert report.clip_factor == pytest.approx(0.01 / norm, rel=1e-3)
        assert report.loss_scale == {0: 1024, 1: 1024, 2: 1024, 3: 512}.get(step, 256)
        assert signal(monitor, "pre_clip") is True

    assert steps(monitor) == (4, 2, 4)
    assert monitor.snapshot is not None
    assert monitor.snapshot.nonfinite_steps[Quantity.GRADIENT] == 0


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("micro_batches", [(1, 1, 1, 1), (2, 2, 1, 2)], ids=["single", "accumulated"])
def test_a_skipped_step_names_the_layer_that_overflowed(
    watch: Callable[..., Monitor], adam: Adam, micro_batches: tuple[int, ...]
) -> None:
    model = net()
    optimizer = adam(model.parameters())
    scaler = NeverAsked("cpu", init_scale=1024.0)
    monitor = watch(model, optimizer)
    for step, parts in enumerate(micro_batches):
        optimizer.zero_grad()
        if step == 2:
            model[2].bias.register_hook(lambda gradient: gradient * math.inf)
        for part in range(parts):
            scaler.scale(loss_of(model, part)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            report = reported(monitor)
            assert report.applied is False
            assert [row.gradient_nonfinite for row in report.layers.rows()] == [0, 3]
            assert report.first_nonfinite is None


@pytest.mark.matrix("scaler")
def test_of_several_optimizers_under_one_scaler_one_may_skip(watch: Callable[..., Monitor], adam: Adam) -> None:
    model = net()
    optimizers = [adam(model[at].parameters()) for at in (0, 2)]
    scaler = NeverAsked("cpu", init_scale=64.0)
    monitor = watch(model, optimizers)
    for step in range(3):
        norms = expected(model, step)
        if step == 1:
            handle = model[0].bias.register_hook(lambda gradient: gradient * math.inf)
        scaler.scale(loss_of(model, step)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        if step == 1:
            handle.remove()
        assert monitor.flush()
        assert monitor.snapshot is not None
        first, second = monitor.snapshot.reports
        assert [first.applied, second.applied] == [step != 1, True]
        assert second.gradient_norm == pytest.approx(norms["2"], rel=1e-5)
        assert first.loss_scale == second.loss_scale == (64.0 if step < 2 else 32.0)

    assert steps(monitor)[:2] == (5, 1)


def overflow(watch: Callable[..., Monitor], factors: list[float], **settings: Any) -> list[FindingKind]:
    """Findings of a run whose loss is multiplied by these factors, one a step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=2.0**16, **settings)
    monitor = watch(model, optimizer)
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step % 4) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.flush()
    assert monitor.snapshot is not None
    assert steps(monitor)[1] == sum(not math.isfinite(factor) for factor in factors)
    assert monitor.snapshot.nonfinite_steps[Quantity.GRADIENT] == 0
    return [finding.kind for finding in monitor.findings]


@pytest.mark.matrix("scaler")
def test_eight_skips_in_a_row_are_a_collapse_of_the_scale(watch: Callable[..., Monitor]) -> None:
    assert FindingKind.SCALE_COLLAPSE in overflow(watch, [1.0] * 20 + [math.inf] * 8)


@pytest.mark.matrix("scaler")
def test_a_scale_that_falls_and_falls_is_a_collapse_whatever_is_applied_in_between(
    watch: Callable[..., Monitor],
) -> None:
    assert FindingKind.SCALE_COLLAPSE in overflow(watch, [1.0] * 20 + [math.inf, math.inf, 1.0] * 5)


@pytest.mark.matrix("scaler")
def test_a_scaler_that_finds_its_scale_and_skips_now_and_then_is_no_collapse(watch: Callable[..., Monitor]) -> None:
    finding_it = [math.inf] * 10 + [1.0] * 20
    now_and_then = ([1.0] * 9 + [math.inf]) * 6

    assert FindingKind.SCALE_COLLAPSE not in overflow(watch, finding_it + now_and_then, growth_interval=8)


@pytest.mark.matrix("scaler")
def test_a_scaler_that_is_off_leaves_no_trace(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    monitor = watch(model, optimizer, scaler)
    for step in range(3):
        norms = expected(model, step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        report = reported(monitor)
        assert report.loss_scale is None
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-5)

    assert signal(monitor, "loss_scale") is None
    assert steps(monitor) == (3, 0, 3)


@pytest.mark.matrix("scaler")
def test_a_scaler_goes_on_from_a_saved_state(watch: Callable[..., Monitor], adam: Adam) -> None:
    saved = GradScaler("cpu", init_scale=8.0).state_dict()
    model = net()
    optimizer = adam(model.parameters())
    scaler = NeverAsked("cpu")
    monitor = watch(model, optimizer, scaler)
    for step in range(3):
        if step == 1:
            scaler.load_state_dict(saved)
        norms = expected(model, step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        report = reported(monitor)
        assert report.loss_scale == (65536.0 if step == 0 else 8.0)
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-5)


@pytest.mark.matrix("scaler")
@pytest.mark.parametrize("told", [True, False], ids=["passed", "not passed"])
def test_a_step_past_the_scaler_after_unscaling_is_right(watch: Callable[..., Monitor], told: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = NeverAsked("cpu", init_scale=256.0)
    monitor = watch(model, optimizer, scaler if told else None)
    for step in range(3):
        norms = expected(model, step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
        report = reported(monitor)
        assert report.loss_scale == 256.0
        assert report.gradient_norm == pytest.approx(norms[""], rel=1e-5)
        assert report.clip_factor == 1.0


@pytest.mark.matrix("scaler")
def test_a_step_past_the_scaler_with_scaled_gradients_is_told_of(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = GradScaler("cpu", init_scale=256.0)
    monitor = watch(model, optimizer, scaler)
    norms = expected(model)
    scaler.scale(loss_of(model)).backward()
    optimizer.step()
    report = reported(monitor)

    assert report.gradient_norm == pytest.approx(256 * norms[""], rel=1e-5)  # what the update used
    assert report.loss_scale is None
    assert signal(monitor, "loss_scale") is False


@pytest.mark.matrix("scaler")
def test_a_scaler_of_a_subclass_is_heard(watch: Callable[..., Monitor], tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=512.0, process_group=dist.group.WORLD)
        monitor = watch(model, optimizer, state_every=1000)
        for step, parts in enumerate((2, 2, 1, 2)):
            optimizer.zero_grad()
            for part in range(parts):
                scaler.scale(loss_of(model, part) * (math.inf if step == 2 else 1)).backward()
            if step != 2:
                scaler.unscale_(optimizer)
                norm = gradexporter.clip_grad_norm_(model.parameters(), 0.01).item()
            scaler.step(optimizer)
            scaler.update()
            report = reported(monitor)
            assert report.applied is (step != 2)
            if report.applied:
                assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
                assert report.clip_factor == pytest.approx(0.01 / norm, rel=1e-3)
            else:
                assert report.nonfinite["gradient"] > 0
        assert steps(monitor) == (3, 1, 3)
    finally:
        dist.destroy_process_group()


def by_hand(watch: Callable[..., Monitor], scales: list[float], clip: Callable[..., Any] | None = None) -> Monitor:
    """A loop that scales its loss and divides its gradients itself."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor: Monitor = watch(model, optimizer, state_every=50)
    for step, scale in enumerate(scales):
        norms = expected(model, step)
        optimizer.zero_grad()
        (loss_of(model, step) * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        if clip is not None:
            clip(model.parameters(), 0.1)
        optimizer.step()
        report = reported(monitor)
        if step >= 6:
            wanted = norms[""] if clip is not nn.utils.clip_grad_norm_ else min(norms[""], 0.1)
            assert report.gradient_norm == pytest.approx(wanted, rel=1e-4)
    return monitor


@pytest.mark.matrix("scale by hand")
@pytest.mark.parametrize("scales", [[1024.0] * 40, [1000.0] * 40, [1024.0] * 20 + [2048.0] * 20])
def test_a_scale_that_the_loop_applies_itself_is_noticed_and_left_out(
    watch: Callable[..., Monitor], scales: list[float]
) -> None:
    monitor = by_hand(watch, scales)

    assert signal(monitor, "loss_scale") is False
    assert signal(monitor, "pre_clip") is False
    assert reported(monitor).loss_scale is None
    assert reported(monitor).clip_factor is None
    assert steps(monitor)[2] <= 4  # until it was noticed
    assert monitor.findings == ()


@pytest.mark.matrix("scale by hand")
def test_with_our_clip_a_scale_by_hand_is_out_of_the_way(watch: Callable[..., Monitor]) -> None:
    monitor = by_hand(watch, [1024.0] * 20, gradexporter.clip_grad_norm_)

    assert signal(monitor, "pre_clip") is True
    assert reported(monitor).clip_factor is not None
    assert monitor.findings == ()


def test_the_wrappers_on_the_scaler_go_with_the_last_monitor() -> None:
    before = (GradScaler.step, GradScaler.unscale_)
    model = net()
    first, second = (
        gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False) for _ in range(2)
    )
    first.close()
    assert GradScaler.unscale_ is not before[1]
    second.close()

    assert (GradScaler.step, GradScaler.unscale_) == before
