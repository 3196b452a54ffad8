"""DeepSpeed's optimizers on two processes, held against one process with the whole batch in float64."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from gradexporter.config import ConfigError
from gradexporter.records import State, StepReport
from tests.distributed.harness import Ranks, logged, rank, watching
from tests.distributed.test_zero import STEPS, Outcome, batch, net

pytestmark = [pytest.mark.slow, pytest.mark.matrix("deepspeed")]

CLIP = 0.5


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")


def prepared(stage: int, micro_batches: int = 1, **config: Any) -> tuple[Any, Any, Any]:
    """An engine, its optimizer and the client optimizer, one parameter group a layer."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = net()
    groups = [{"params": list(model[at].parameters()), "lr": 0.05} for at in (0, 2)]
    client = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    settings = {
        "train_micro_batch_size_per_gpu": 8 // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": CLIP,
        **config,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=client, config=settings)
    return engine, optimizer, client


def train(stage: int, watched: str, micro_batches: int = 1) -> Outcome:
    engine, optimizer, client = prepared(stage, micro_batches)
    model = engine.module if watched == "module" else engine
    passed = client if watched == "client" else optimizer
    reports, losses = [], []
    with logged() as lines, watching(model, passed, disabled=watched == "nothing") as monitor:
        for step in range(STEPS):
            x, y = (part.chunk(2)[rank()] for part in batch(step))
            for some, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                loss = nn.functional.mse_loss(engine(some), targets)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            if monitor.snapshot is not None:
                assert monitor.flush()
                assert monitor.report is not None
                reports.append(monitor.report)
        signals = dict(monitor.snapshot.itself.signal_available) if monitor.snapshot is not None else {}
    assert "step" not in vars(optimizer) or watched == "nothing"
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return Outcome(reports, weights, losses, signals, lines)


def reference() -> list[tuple[float, float]]:
    """Norms of gradient, before clipping, and parameters of each step: one process, the whole batch, float64."""
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    norms = []
    for step in range(STEPS):
        x, y = (part.double() for part in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        norms.append((norm, torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()))
    return norms


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("watched", "micro_batches"), [("engine", 1), ("engine", 2), ("module", 1), ("client", 1)])
def test_the_gradient_norm_is_deepspeeds_and_what_lies_in_partitions_is_absent(
    two_ranks: Ranks, stage: int, watched: str, micro_batches: int
) -> None:
    for outcome in two_ranks.run(train, stage, watched, micro_batches):
        assert [report.step for report in outcome.reports] == [1, 2, 3]
        for report, (gradient, parameters) in zip(outcome.reports, reference(), strict=True):
            assert report.applied is True
            assert report.learning_rate == 0.05
            assert report.gradient_norm == pytest.approx(gradient, rel=1e-4)
            if stage < 3:
                assert report.parameter_norm == pytest.approx(parameters, rel=1e-4)
            else:
                assert report.parameter_norm is None
            assert report.update_ratio is None
            assert report.momentum_max_abs is None
            rows = {row.layer: row for row in report.layers.rows()}
            assert set(rows) == {"0", "2"}
            assert all(row.gradient_norm is None and row.activation_rms is not None for row in rows.values())
        assert outcome.signals["gradient"] is True
        assert outcome.signals["layer_gradient"] is False
        assert outcome.signals["update_ratio"] is False
        (line,) = outcome.lines
        assert "partitions" in line


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_and_weights_are_those_of_a_run_that_is_not_watched(two_ranks: Ranks, stage: int) -> None:
    watched: list[Outcome] = two_ranks.run(train, stage, "engine")
    bare: list[Outcome] = two_ranks.run(train, stage, "nothing")

    for one, other in zip(watched, bare, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_without_partitions_the_reduced_gradient_is_measured_at_the_update(
    two_ranks: Ranks, micro_batches: int
) -> None:
    for outcome in two_ranks.run(train, 0, "engine", micro_batches):
        for report, (gradient, parameters) in zip(outcome.reports, reference(), strict=True):
            assert report.gradient_norm == pytest.approx(min(gradient, CLIP), rel=1e-4)
            assert report.parameter_norm == pytest.approx(parameters, rel=1e-4)
        assert outcome.signals["layer_gradient"] is True
        assert outcome.signals["pre_clip"] is False


def overflows(stage: int) -> list[StepReport]:
    engine, optimizer, _ = prepared(stage)
    reports = []
    with watching(engine, optimizer) as monitor:
        for factor in (1.0, math.inf, 1.0):
            x, y = (part.chunk(2)[rank()] for part in batch(0))
            engine.backward(nn.functional.mse_loss(engine(x), y) * factor)
            engine.step()
            assert monitor.flush()
            assert monitor.report is not None
            reports.append(monitor.report)
    engine.destroy()
    return reports


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_that_overflowed_is_a_skipped_step(two_ranks: Ranks, stage: int) -> None:
    for reports in two_ranks.run(overflows, stage):
        assert [report.applied for report in reports] == [True, False, True]
        assert all(report.state is not State.NONFINITE for report in reports)


def refused() -> str:
    engine, _, client = prepared(1)
    try:
        with watching(engine.module, client):
            return ""
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()


def test_partitions_without_the_engine_are_refused_in_words(two_ranks: Ranks) -> None:
    assert all("under DeepSpeed pass the engine" in text for text in two_ranks.run(refused))
