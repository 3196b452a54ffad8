"""What loops do with sharded models: gather, accumulate, clip, lower precision, checkpoint, load."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.distributed.harness import Ranks, logged, rank, watching
from tests.distributed.test_sharded import (
    OPTIMIZERS,
    STEPS,
    Row,
    added,
    alone,
    fsdp1,
    fsdp2,
    loss_of,
    net,
    run,
    seen,
    wrapped,
)


def whole(tensors: list[Tensor | None]) -> float:
    """Norm of all the tensors together, gathered from the ranks."""
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return torch.cat([t.double().flatten() for t in full]).norm().item()


def local(tensors: list[Tensor]) -> Tensor:
    return torch.cat([getattr(t.detach(), "to_local", t.detach)().double().flatten() for t in tensors])


# -- the state of the wrapper, when watch is called ---------------------------------------------------


def gathered() -> Row:
    model, rows = wrapped("fsdp2", net())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.eval()
    with torch.no_grad():
        loss_of(model, 0, rows)  # leaves the parameters of the root gathered
    model.train()
    with watching(model, optimizer) as monitor:
        loss_of(model, 0, rows).backward()
        optimizer.step()
        assert monitor.flush()
        return seen(monitor.report)


def test_parameters_that_are_gathered_when_watch_is_called_are_those_of_the_optimizer(two_ranks: Ranks) -> None:
    shares = two_ranks.run(gathered)
    one = alone("sgd")[0]

    assert added(share["norm"] for share in shares) == pytest.approx(one["norm"], rel=1e-5)
    assert [list(share["layers"]) for share in shares] == [list(one["layers"])] * 2


def sharded_afterwards() -> list[str]:
    model = net()
    with logged() as lines, watching(model, OPTIMIZERS["sgd"](model.parameters())) as monitor:
        fsdp2(model)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
        assert monitor.flush()
        return [*lines]


def test_a_model_that_is_sharded_after_watch_is_told_of_once(two_ranks: Ranks) -> None:
    for lines in two_ranks.run(sharded_afterwards):
        (line,) = lines
        assert "call watch() on the wrapped model" in line


def offloaded() -> int:
    model = fsdp2(net())
    for module in (model, *model.blocks):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.offload_to_cpu = parameter.pin_memory = True  # as CPUOffloadPolicy does beside a GPU
    with watching(model, OPTIMIZERS["sgd"](model.parameters())):
        return sum(len(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters())


def test_of_gradients_that_are_offloaded_behind_the_backward_one_is_waited_for(two_ranks: Ranks) -> None:
    assert two_ranks.run(offloaded) == [1, 1]


# -- accumulation ---------------------------------------------------------------------------------------


def accumulated(how: str) -> list[Row]:
    model, rows = wrapped(how, net())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    middle = (rows.start + rows.stop) // 2
    steps = []
    with watching(model, optimizer) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            for last, part in enumerate((slice(rows.start, middle), slice(middle, rows.stop))):
                quiet: Any = contextlib.nullcontext()
                if "fsdp1" in how and not last:
                    quiet = model.no_sync()  # type: ignore[operator]
                elif "fsdp2" in how:
                    model.set_requires_gradient_sync(bool(last))  # type: ignore[operator]
                with quiet:
                    (loss_of(model, step, part) / 2).backward()
            optimizer.step()
            assert monitor.flush()
            steps.append(seen(monitor.report))
    return steps


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1 FULL_SHARD orig", "fsdp1 SHARD_GRAD_OP flat"])
def test_micro_batches_that_are_not_reduced_are_one_step_with_the_gradient_of_the_update(
    two_ranks: Ranks, how: str
) -> None:
    results = two_ranks.run(accumulated, how)

    for step, one in enumerate(alone("sgd")):
        assert added(result[step]["norm"] for result in results) == pytest.approx(one["norm"], rel=1e-5)


# -- clipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1 FULL_SHARD flat"])
def test_clipping_of_shares_leaves_the_norm_before_it_and_tells_its_factor(two_ranks: Ranks, how: str) -> None:
    results = two_ranks.run(run, how, "sgd", True, 0.1)

    for step, one in enumerate(alone("sgd", clip=0.1)):
        shares = [result["steps"][step] for result in results]
        assert added(share["norm"] for share in shares) == pytest.approx(one["norm"], rel=1e-5)
        assert one["clip"] < 1
        assert {share["clip"] is None or share["clip"] == pytest.approx(one["clip"], rel=1e-3) for share in shares} == {
            True
        }
    assert any(result["steps"][0]["clip"] is not None for result in results)


# -- updates and precision ----------------------------------------------------------------------------------


def updated(optimizer: str, half: bool) -> list[tuple[float | None, float, float | None, float]]:
    """Update ratio and norm as published, each beside what the tensors say."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    model = fsdp2(net(), **({"mp_policy": policy} if policy else {}))
    made = OPTIMIZERS[optimizer](model.parameters())
    rows = slice(rank() * 4, rank() * 4 + 4)
    steps = []
    with watching(model, made) as monitor:
        for step in range(STEPS):
            if step == 1:
                model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
                made.load_state_dict(made.state_dict())
            before = local(list(model.parameters())).clone()
            made.zero_grad()
            loss_of(model, step, rows).backward()
            norm = whole([p.grad for p in model.parameters()])
            made.step()
            moved = local(list(model.parameters())) - before
            assert monitor.flush()
            assert monitor.report is not None
            ratio = (moved.norm() / before.norm()).item()
            steps.append((monitor.report.update_ratio, ratio, monitor.report.gradient_norm, norm))
    return steps


@pytest.mark.parametrize(("optimizer", "half"), [("foreach", False), ("fused", True), ("sgd", False)])
def test_updates_of_shares_are_rebuilt_from_their_state_also_after_a_load(
    two_ranks: Ranks, optimizer: str, half: bool
) -> None:
    results = two_ranks.run(updated, optimizer, half)

    for step in range(STEPS):
        rows = [result[step] for result in results]
        assert added(published for *_, published, _ in rows) == pytest.approx(rows[0][3], rel=1e-5)
        if step == STEPS - 1:  # of the steps before, the parameters were changed by hand or not yet measured
            for published, expected, *_ in rows:
                assert published == pytest.approx(expected, rel=1e-3)


# -- checkpointing --------------------------------------------------------------------------------------------


def checkpointed() -> Row:
    model = net()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block)
    fsdp2(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with watching(model, optimizer) as monitor:
        loss_of(model, 0, slice(rank() * 4, rank() * 4 + 4)).backward()
        optimizer.step()
        assert monitor.flush()
        return seen(monitor.report)


def test_checkpointed_blocks_have_the_names_and_the_outputs_of_bare_ones(two_ranks: Ranks) -> None:
    shares = two_ranks.run(checkpointed)
    plain = [result["steps"][0] for result in two_ranks.run(run, "fsdp2", "sgd")]

    for mine, bare in zip(shares, plain, strict=True):
        assert mine["layers"] == pytest.approx(bare["layers"])
        assert mine["activations"] == pytest.approx(bare["activations"])


# -- gradients that are not reduced, parameters that are not sharded ---------------------------------------------


def sequence_parallel(size: int, sharded: bool) -> tuple[nn.Module, int]:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))

    class Rows(nn.Module):
        """A batch of one sequence, whose length is what is split."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net.leave(self.net.norm(self.net.enter(x.unsqueeze(0))))
            return out.squeeze(0)

    model = Rows()
    del model.net.blocks
    plan = {
        "net.enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "net.norm": SequenceParallel(),
        "net.leave": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    return model, rank() // 2


def sequenced(size: int, sharded: bool) -> dict[str, Any]:
    model, part = sequence_parallel(size, sharded)
    rows = slice(part * 4, part * 4 + 4)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with logged() as lines, watching(model, optimizer) as monitor:
        loss_of(model, 0, rows).backward()
        norm = whole([p.grad for p in model.parameters()])
        optimizer.step()
        assert monitor.flush()
        assert monitor.snapshot is not None
        signal = monitor.snapshot.itself.signal_available["gradient"]
        return {**seen(monitor.report), "signal": signal, "whole": norm, "lines": [*lines]}


@pytest.mark.matrix("tensor")
def test_a_gradient_that_is_not_reduced_yet_is_absent_and_so_is_the_norm_of_the_model(two_ranks: Ranks) -> None:
    for result in two_ranks.run(sequenced, 2, False):
        assert result["norm"] is None
        assert result["largest"] is None
        assert result["signal"] is False
        assert [name for name, norm in result["layers"].items() if norm is None] == ["net.norm"]
        assert result["parameters"] is not None
        assert [line for line in result["lines"] if "not reduced over ranks" in line and "net.norm" in line]


@pytest.mark.matrix("tensor")
def test_fsdp2_reduces_what_sequence_parallelism_leaves(four_ranks: Ranks) -> None:
    results = four_ranks.run(sequenced, 4, True)

    assert added(result["norm"] for result in results) == pytest.approx(results[0]["whole"], rel=1e-5)
    assert {result["signal"] for result in results} == {True}


def ignored() -> dict[str, Any]:
    model = net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params=set(model.norm.parameters()))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with watching(model, optimizer) as monitor:
        loss_of(model, 0).backward()  # the same batch on both ranks, so that nothing need be reduced
        optimizer.step()
        assert monitor.flush()
        return seen(monitor.report)


def test_plain_parameters_beside_sharded_ones_count_once(two_ranks: Ranks) -> None:
    shares = two_ranks.run(ignored)
    one = alone("sgd")[0]

    assert added(share["norm"] for share in shares) == pytest.approx(one["norm"], rel=1e-5)
    assert added(share["layers"]["norm"] for share in shares) == pytest.approx(one["layers"]["norm"], rel=1e-5)


def unsharded(orig: bool) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fsdp1(net(), "NO_SHARD", orig)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with watching(model, optimizer) as monitor:
        loss_of(model, 0, slice(rank() * 4, rank() * 4 + 4)).backward()
        optimizer.step()
        assert monitor.flush()
        assert monitor.snapshot is not None
        return {**seen(monitor.report), "norms": monitor.snapshot.itself.norms}


@pytest.mark.parametrize("orig", [True, False])
def test_a_wrapper_that_shards_nothing_leaves_every_rank_the_norm_of_the_model(two_ranks: Ranks, orig: bool) -> None:
    one = alone("sgd")[0]
    for result in two_ranks.run(unsharded, orig):
        assert result["norms"] == "global"
        assert result["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert result["layers"] == pytest.approx(one["layers"], rel=1e-5, abs=1e-6)


# -- collectives ------------------------------------------------------------------------------------------------


ROUNDS = 3
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")


def collectives(how: str, watched: bool, all_reduce: bool = False) -> Counter[str]:
    """What is issued over the steps of a loop, on any thread: at torch's interface, and by torch itself."""
    model, rows = wrapped(how, net())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(torch.distributed, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with watching(model, optimizer, all_reduce=all_reduce) if watched else contextlib.nullcontext() as monitor:
        with pytest.MonkeyPatch.context() as patch, torch.profiler.profile() as profile:
            for name in COLLECTIVES:
                patch.setattr(torch.distributed, name, counting(name))
            for _ in range(ROUNDS):
                loss_of(model, 0, rows).backward()
                optimizer.step()
                optimizer.zero_grad()
            if monitor is not None:
                assert monitor.flush()
        own = {e.key: e.count for e in profile.key_averages() if e.key.startswith(("gloo:", "c10d::"))}
        return calls + Counter(own)


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1 FULL_SHARD orig", "tp"])
def test_no_collective_is_issued_that_was_not_asked_for(two_ranks: Ranks, how: str) -> None:
    mine, bare = two_ranks.run(collectives, how, True), two_ranks.run(collectives, how, False)

    assert mine == bare
    assert all(bare)


def test_one_collective_a_step_is_issued_where_it_was_asked_for(two_ranks: Ranks) -> None:
    mine, bare = two_ranks.run(collectives, "fsdp2", True, True), two_ranks.run(collectives, "fsdp2", False)

    for with_us, without in zip(mine, bare, strict=True):
        assert with_us["all_reduce"] - without["all_reduce"] == ROUNDS
