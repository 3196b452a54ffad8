"""Sharded models: the shares that ranks publish, added as the README says, against one process in float64."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.request
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradexporter.monitor import Monitor
from gradexporter.records import StepReport
from tests.conftest import ROOT
from tests.distributed.harness import Ranks, logged, rank, watching
from tests.promql import fenced_queries

STEPS = 3
ROWS = 8


class Block(nn.Module):
    """Shapes that no number of ranks divides, and a parameter that is smaller than the number of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.norm = nn.LayerNorm(5)
        self.leave = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, fused=True),
}


# -- wrappers: each takes the bare model and gives the wrapped one and the batch's split over ranks -----


def fsdp2(model: nn.Module, **settings: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def fsdp1(model: nn.Module, strategy: str, orig: bool, **settings: Any) -> nn.Module:
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **settings,
    )


PLAN = {
    "blocks.0.up": ColwiseParallel(),
    "blocks.0.down": RowwiseParallel(),
    "blocks.1.up": ColwiseParallel(),
    "blocks.1.down": RowwiseParallel(),
    "leave": ColwiseParallel(output_layouts=Replicate()),
}


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), PLAN)


def hybrid(model: nn.Module) -> nn.Module:
    return fsdp2(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def two_dimensions(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp2(parallelize_module(model, mesh["tensor"], PLAN), mesh=mesh["data"])


def hybrid1(model: nn.Module, orig: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(model, "HYBRID_SHARD", orig, device_mesh=mesh)


def wrapped(how: str, model: nn.Module) -> tuple[nn.Module, slice]:
    """The wrapped model and the rows of a batch that this rank works on."""
    parts = how.split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of wrappers that are on their way out
        if parts[0] == "fsdp1":
            model = fsdp1(model, parts[1], parts[2] == "orig")
        elif parts[0] == "fsdp2":
            model = fsdp2(model, reshard_after_forward="kept" not in parts)
        else:
            makers: dict[str, Callable[[nn.Module], nn.Module]] = {
                "tp": tensor_parallel,
                "hsdp": hybrid,
                "tp x fsdp2": two_dimensions,
                "hsdp1 orig": lambda model: hybrid1(model, True),
                "hsdp1 flat": lambda model: hybrid1(model, False),
            }
            model = makers[how](model)
    replicas = {"tp": 1, "tp x fsdp2": 2}.get(how, dist.get_world_size())
    share = ROWS // replicas
    place = rank() * replicas // dist.get_world_size()
    return model, slice(place * share, (place + 1) * share)


def loss_of(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    x, y = batch(step)
    x = x.to(next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(x[rows]), y[rows])


Row = dict[str, Any]


def seen(report: StepReport | None) -> Row:
    assert report is not None
    layers = {row.layer: row for row in report.layers.rows()}
    return {
        "norm": report.gradient_norm,
        "largest": report.gradient_max_abs,
        "parameters": report.parameter_norm,
        "momentum": report.momentum_max_abs,
        "ratio": report.update_ratio,
        "clip": report.clip_factor,
        "layers": {name: row.gradient_norm for name, row in layers.items()},
        "layer parameters": {name: row.parameter_norm for name, row in layers.items()},
        "activations": {name: row.activation_rms for name, row in layers.items()},
    }


def run(how: str, optimizer: str, watched: bool = True, clip: float | None = None) -> dict[str, Any]:
    model, rows = wrapped(how, net())
    made = OPTIMIZERS[optimizer](model.parameters())

    def train(monitor: Monitor | None) -> dict[str, Any]:
        steps, losses = [], []
        for step in range(STEPS):
            made.zero_grad()
            loss = loss_of(model, step, rows)
            loss.backward()
            if clip is not None:
                clipper = getattr(model, "clip_grad_norm_", None)
                clipper(clip) if clipper else nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            losses.append(loss.item())
            if monitor is not None:
                assert monitor.flush()
                steps.append(seen(monitor.report))
        weights = [getattr(p.detach(), "to_local", lambda p=p: p.detach())().clone() for p in model.parameters()]
        facts: dict[str, Any] = {}
        if monitor is not None:
            assert monitor.snapshot is not None
            facts = {"norms": monitor.snapshot.itself.norms, "signals": monitor.snapshot.itself.signal_available}
        return {"steps": steps, "losses": losses, "weights": weights, **facts}

    if not watched:
        return train(None)
    with watching(model, made) as monitor:
        return train(monitor)


def alone(optimizer: str, clip: float | None = None) -> list[Row]:
    """What one process measures of itself in float64."""
    model = net().double()
    made = OPTIMIZERS[optimizer](model.parameters())
    owners = {name: module for name, module in model.named_modules() if module._parameters}
    steps = []
    for step in range(STEPS):
        made.zero_grad()
        loss_of(model, step).backward()

        def joined(module: nn.Module, gradients: bool = True) -> Tensor:
            return torch.cat([(p.grad if gradients else p.detach()).flatten() for p in module._parameters.values()])  # type: ignore[union-attr]

        gradients = {name: joined(module).clone() for name, module in owners.items()}
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        norm = torch.cat(list(gradients.values())).norm().item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        moments = [made.state[p].get("exp_avg", made.state[p].get("momentum_buffer")) for p in model.parameters()]
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
        steps.append(
            {
                "norm": norm,
                "largest": max(gradient.abs().max().item() for gradient in gradients.values()),
                "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item(),
                "momentum": max(moment.abs().max().item() for moment in moments),
                "ratio": (moved.norm() / before.norm()).item(),
                "clip": 1.0 if clip is None else min(1.0, clip / norm),
                "layers": {name: gradient.norm().item() for name, gradient in gradients.items()},
                "layer parameters": {name: joined(module, False).norm().item() for name, module in owners.items()},
            }
        )
    return steps


def run_reduced(how: str) -> dict[str, Any]:
    """As ``run`` with all_reduce."""
    model, rows = wrapped(how, net())
    made = OPTIMIZERS["sgd"](model.parameters())
    with watching(model, made, all_reduce=True) as monitor:
        steps = []
        for step in range(STEPS):
            made.zero_grad()
            loss_of(model, step, rows).backward()
            made.step()
            assert monitor.flush()
            steps.append(seen(monitor.report))
        assert monitor.snapshot is not None
        facts = {"norms": monitor.snapshot.itself.norms, "signals": monitor.snapshot.itself.signal_available}
    return {"steps": steps, **facts}


def one_leaves() -> list[tuple[float | None, str, bool, list[str]]]:
    model, rows = wrapped("fsdp2", net())
    made = OPTIMIZERS["sgd"](model.parameters())
    seen = []
    with logged() as lines, watching(model, made, all_reduce=True) as monitor:
        for step in range(3):
            if step == 1 and rank() == 1:
                monitor.close()
            made.zero_grad()
            loss_of(model, step, rows).backward()
            made.step()
            assert monitor.flush()
            assert monitor.report is not None
            assert monitor.snapshot is not None
            itself = monitor.snapshot.itself
            seen.append((monitor.report.gradient_norm, itself.norms, itself.signal_available["all_reduce"], [*lines]))
    return seen


def scraped(how: str) -> str:
    model, rows = wrapped(how, net())
    made = OPTIMIZERS["sgd"](model.parameters())
    with watching(model, made, serve=True, host="127.0.0.1", port=0, aligned_every=2) as monitor:
        for step in range(STEPS):
            made.zero_grad()
            loss_of(model, step, rows).backward()
            made.step()
        assert monitor.flush()
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor.port}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
    return text


def added(values: Iterable[float | None]) -> float:
    """Shares of a norm over the ranks, as the documented query adds them; an empty share is absent."""
    return math.sqrt(sum(value**2 for value in values if value is not None))


TWO = ["fsdp2", "fsdp2 kept", "tp"]
TWO += [f"fsdp1 {strategy} {kind}" for strategy in ("FULL_SHARD", "SHARD_GRAD_OP") for kind in ("orig", "flat")]
FOUR = ["fsdp2", "hsdp", "tp x fsdp2", "hsdp1 orig", "hsdp1 flat"]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks


EVERYWHERE = [
    *(pytest.param("two_ranks", how, id=f"2 ranks, {how}") for how in TWO),
    *(pytest.param("four_ranks", how, id=f"4 ranks, {how}") for how in FOUR),
]


@pytest.mark.matrix("fsdp")
@pytest.mark.matrix("tensor")
@pytest.mark.parametrize(("ranks", "how"), EVERYWHERE, indirect=["ranks"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_shares_of_all_ranks_add_up_to_the_norms_of_one_process(ranks: Ranks, how: str, optimizer: str) -> None:
    results = ranks.run(run, how, optimizer)
    expected = alone(optimizer)

    for step, one in enumerate(expected):
        shares = [result["steps"][step] for result in results]
        assert added(share["norm"] for share in shares) == pytest.approx(one["norm"], rel=1e-5)
        assert added(share["parameters"] for share in shares) == pytest.approx(one["parameters"], rel=1e-5)
        assert max(share["largest"] for share in shares) == pytest.approx(one["largest"], rel=1e-5)
        assert max(share["momentum"] for share in shares) == pytest.approx(one["momentum"], rel=1e-4)
        for column in ("layers", "layer parameters"):
            for share in shares:
                assert list(share[column]) == list(one[column])
            for name, norm in one[column].items():
                assert added(share[column][name] for share in shares) == pytest.approx(norm, rel=1e-5, abs=1e-6), name
    assert {result["norms"] for result in results} == {"share"}


@pytest.mark.parametrize(("ranks", "how"), EVERYWHERE, indirect=["ranks"])
def test_a_sharded_run_is_bit_for_bit_that_without_us(ranks: Ranks, how: str) -> None:
    for mine, bare in zip(ranks.run(run, how, "adam", True), ranks.run(run, how, "adam", False), strict=True):
        assert mine["losses"] == bare["losses"]
        assert all(torch.equal(a, b) for a, b in zip(mine["weights"], bare["weights"], strict=True))


@pytest.mark.parametrize("how", ["fsdp2", "tp"])
def test_the_query_of_the_readme_gives_the_norm_of_one_process(
    two_ranks: Ranks, how: str, tool: Callable[..., str], tmp_path: Path
) -> None:
    """STEPS is 3 and aligned_every 2, so that what is added is the step before the last."""
    (query,) = [query for query in fenced_queries((ROOT / "README.md").read_text()) if "aligned" in query]
    series = []
    for text in two_ranks.run(scraped, how):
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("gradexporter_")]
        series += [{"series": name, "values": value} for name, value in lines]
    expected = alone("sgd")[1]["norm"]
    test = {
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f"abs(({query}) / {expected!r} - 1) < bool 1e-5",
                "eval_time": "0s",
                "exp_samples": [{"labels": f'{{run_id="{_run_id(series)}"}}', "value": 1}],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stdout + done.stderr


def _run_id(series: list[dict[str, str]]) -> str:
    found = {re.search(r'run_id="([^"]*)"', each["series"])[1] for each in series}  # type: ignore[index]
    (run_id,) = found
    return run_id


# -- all_reduce -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "how"),
    [("two_ranks", "tp"), ("two_ranks", "fsdp1 FULL_SHARD orig"), ("four_ranks", "fsdp2"), ("four_ranks", "hsdp")],
    indirect=["ranks"],
)
def test_with_all_reduce_every_rank_publishes_the_norms_of_the_model(ranks: Ranks, how: str) -> None:
    results = ranks.run(run_reduced, how)
    expected = alone("sgd")

    for result in results:
        assert result["norms"] == "global"
        assert result["signals"]["all_reduce"] is True
        for step, one in enumerate(expected):
            row = result["steps"][step]
            assert row["norm"] == pytest.approx(one["norm"], rel=1e-5)
            assert row["parameters"] == pytest.approx(one["parameters"], rel=1e-5)
            assert row["layers"] == pytest.approx(one["layers"], rel=1e-5, abs=1e-6)
            assert row["layer parameters"] == pytest.approx(one["layer parameters"], rel=1e-5)


def test_a_rank_that_closes_its_monitor_leaves_the_others_with_their_shares(two_ranks: Ranks) -> None:
    stayed, left = two_ranks.run(one_leaves)
    expected = [one["norm"] for one in alone("sgd")]

    assert stayed[0][0] == pytest.approx(expected[0], rel=1e-5)
    assert [facts[1:3] for facts in stayed] == [("global", True), ("share", False), ("share", False)]
    assert all(norm is not None and norm < whole for (norm, *_), whole in zip(stayed[1:], expected[1:], strict=True))
    assert [line for line in stayed[-1][3] if "a rank closed its monitor" in line]
    assert left[-1][0] == left[0][0]
