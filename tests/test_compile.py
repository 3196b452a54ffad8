"""Under ``torch.compile``: the same is published as without it, and the compiled program stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, library, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gradexporter import stats
from gradexporter.hooks import compiled, points
from gradexporter.monitor import Monitor

Watch = Callable[..., Monitor]
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass
class Ran:
    """What a run of three steps came to."""

    losses: list[float]
    parameters: list[Tensor]
    graphs: int
    breaks: int
    rows: dict[str, tuple[float | None, ...]]
    step: int


def counted(kind: str) -> int:
    return sum(dynamo.utils.counters[kind].values())


def train(
    make: Callable[[], nn.Module],
    prepare: Callable[[nn.Module, torch.optim.Optimizer], Step],
    watch: Watch | None = None,
    **settings: Any,
) -> Ran:
    """Three steps on batches of three sizes, after ``prepare`` has made a step of model and optimizer."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = make()
    updater = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor = watch(model, updater, **settings) if watch else None
    step = prepare(model, updater)
    losses = [step(torch.randn(size, 6)).item() for size in (4, 5, 6)]
    graphs, breaks = dynamo.utils.counters["stats"]["unique_graphs"], counted("graph_break")
    ran = Ran(losses, [p.detach().clone() for p in model.parameters()], graphs, breaks, {}, 0)
    if monitor is not None:
        assert monitor.flush()
        report = monitor.report
        assert report is not None
        ran.step = report.step
        ran.rows = {
            row.layer: (
                row.activation_rms,
                row.activation_max_abs,
                row.activation_zero_ratio,
                row.activation_nonfinite,
                row.execution_order,
                row.gradient_norm,
                row.update_ratio,
            )
            for row in report.layers.rows()
        }
        monitor.close()
    return ran


def usual(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Step:
    return usual(torch.compile(model, **{"backend": "aot_eager", **options}), optimizer)


def method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    model.compile(backend="aot_eager")
    return usual(model, optimizer)


def regional(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    assert isinstance(model, Net)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return usual(model, optimizer)


def with_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    forward = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def update_too(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    update = torch.compile(optimizer.step, backend="aot_eager")
    forward = torch.compile(model, backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        update()
        return loss

    return step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return torch.compile(usual(model, optimizer), backend="aot_eager")


def compiled_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    inner = whole(model, optimizer)

    def step(x: Tensor) -> Tensor:
        with dynamo.config.patch(compiled_autograd=True):
            return inner(x)

    return step


def near(first: dict[str, tuple[float | None, ...]], second: dict[str, tuple[float | None, ...]]) -> bool:
    return first.keys() == second.keys() and all(
        (a is None and b is None) or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-5))
        for layer in first
        for a, b in zip(first[layer], second[layer], strict=True)
    )


@pytest.mark.matrix("compile")
@pytest.mark.parametrize(
    "prepare",
    [
        whole,
        functools.partial(whole, fullgraph=True, dynamic=True),
        method,
        regional,
        with_loss,
        update_too,
        everything,
        compiled_autograd,
    ],
    ids=["whole", "fullgraph, dynamic", "method", "regional", "with loss", "update", "whole step", "compiled autograd"],
)
def test_compiled_code_is_measured_like_eager_code_and_stays_as_it_is(watch: Watch, prepare: Any) -> None:
    bare = train(Net, prepare)
    watched = train(Net, prepare, watch)
    eager = train(Net, usual, watch)

    assert near(watched.rows, eager.rows)
    assert None not in itertools.chain.from_iterable(watched.rows.values())
    assert watched.step == 3
    assert watched.breaks == bare.breaks
    # A compiled optimizer tells of its step in two graphs of its own, where torch breaks its graph anyway.
    own = 2 if prepare in (update_too, everything) else 0
    assert watched.graphs <= bare.graphs + own * (bare.graphs > 0)
    assert watched.losses == bare.losses
    assert all(map(torch.equal, watched.parameters, bare.parameters))


def inside(call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A model that hands a part of itself to ``call``."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 6)
            self.part = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return call(self.part, self.before(x))

    return Outer


def in_bfloat16(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return part(x).float()


SELECTED = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.matrix("compile")
def test_a_backward_that_may_not_break_stays_whole_and_is_measured_at_the_update(watch: Watch) -> None:
    from torch._dynamo import compiled_autograd as engine

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        with engine._enable(compiler):
            loss.backward()
        norm = math.hypot(*(p.grad.double().norm().item() for p in model.parameters() if p.grad is not None))
        optimizer.step()
        assert monitor.flush()
        assert monitor.report is not None
        assert monitor.report.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert monitor.report.step == 3
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.signal_available["pre_clip"] is False


@pytest.mark.matrix("compile")
@pytest.mark.parametrize(
    "call",
    [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTED),
        in_bfloat16,
        lambda part, x: part(part(x)),
        lambda part, x: torch.func.functional_call(part, {"0.weight": part[0].weight * 2}, (x,)),
    ],
    ids=["checkpoint", "reentrant", "selective", "autocast", "twice", "functional call"],
)
def test_what_surrounds_a_layer_inside_compiled_code_changes_nothing(watch: Watch, call: Any) -> None:
    prepare = functools.partial(whole, fullgraph=True)
    bare = train(inside(call), prepare)
    watched = train(inside(call), prepare, watch)
    eager = train(inside(call), usual, watch)

    assert near(watched.rows, eager.rows)
    assert watched.losses == bare.losses
    assert all(map(torch.equal, watched.parameters, bare.parameters))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            lambda part, x: torch.cond(x.sum() > 0, lambda y: part(y), lambda y: part(y) * 2, (x,)),
            marks=pytest.mark.slow,
        ),
        lambda part, x: torch.func.vmap(part)(x),
        lambda part, x: x + torch.func.grad(lambda y: part(y).sum())(x),
        pytest.param(lambda part, x: torch._higher_order_ops.map(lambda y: part(y), x), marks=pytest.mark.slow),
    ],
    ids=["cond", "vmap", "grad", "map"],
)
def test_an_inner_graph_that_lets_nothing_be_written_is_left_alone(watch: Watch, call: Any) -> None:
    prepare = functools.partial(whole, fullgraph=True)
    bare = train(inside(call), prepare)
    watched = train(inside(call), prepare, watch)

    assert watched.rows["before"][0] is not None
    assert watched.rows["part.0"][0] is None
    assert watched.losses == bare.losses


@dataclasses.dataclass
class Result:
    hidden: Tensor
    more: Any


class Various(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        made = {
            "tuple": (y, y * 2, None, 3, "word"),
            "dict": {"a": y, "b": [y * 3]},
            "dataclass": Result(y, (y * 2,)),
            "complex": (y, torch.complex(y, y)),
        }
        return made[self.kind]


class Uses(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.various = Various(kind)

    def forward(self, x: Tensor) -> Tensor:
        result = self.various(x)
        return result.hidden if isinstance(result, Result) else next(iter(getattr(result, "values", lambda: result)()))


@pytest.mark.matrix("compile")
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "complex"])
def test_structures_that_layers_return_are_looked_into_inside_compiled_code(watch: Watch, kind: str) -> None:
    prepare = functools.partial(whole, fullgraph=True)

    assert near(train(lambda: Uses(kind), prepare, watch).rows, train(lambda: Uses(kind), usual, watch).rows)


def test_a_sentinel_alone_counts_what_is_not_finite_inside_compiled_code(watch: Watch) -> None:
    class Bursts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((6,), 1e30))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * 1e30

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Bursts(), nn.Linear(6, 2))

    ran = train(make, whole, watch, activation_every=1000, state_every=1000)

    assert {layer: row[3] > 0 for layer, row in ran.rows.items() if row[3] is not None} == {
        "0": math.isnan(ran.losses[1]),
        "1": True,
        "2": True,
    }
    order = [row[4] for row in ran.rows.values() if row[4] is not None]
    assert order == sorted(order)
    assert ran.rows["1"][0] is None


@pytest.mark.matrix("compile")
def test_evaluation_in_compiled_code_is_not_counted(watch: Watch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = usual(forward, optimizer)
    x = torch.randn(4, 6)
    step(x)

    with torch.no_grad():
        forward(x * 100)
    with torch.inference_mode():
        forward(x * 100)
    model.eval()
    forward(x * 100)
    model.train()
    step(x)
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.activation_max_abs is not None
    assert monitor.report.activation_max_abs < 50


def test_the_range_of_the_input_is_measured_where_the_model_is_called_by_compiled_code(watch: Watch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    step = with_loss(model, optimizer)

    step(torch.full((4, 6), 3.0))
    step(torch.full((4, 6), 7.0))
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.input_max_abs == 7.0


@pytest.mark.matrix("compile")
def test_parameters_that_join_the_optimizer_later_compile_nothing_anew(watch: Watch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    step = whole(model, optimizer, fullgraph=True)
    step(torch.randn(4, 6))
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]

    optimizer.add_param_group({"params": model.head.parameters()})
    step(torch.randn(4, 6))
    step(torch.randn(4, 6))
    assert monitor.flush()

    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert monitor.report is not None
    assert all(row.activation_rms is not None for row in monitor.report.layers.rows())


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_nothing_of_ours(watch: Watch, strict: bool) -> None:
    model = Net()
    x = torch.randn(4, 6)
    bare = torch.export.export(model, (x,), strict=strict)
    watch(model, torch.optim.SGD(model.parameters(), lr=0.1))

    program = torch.export.export(model, (x,), strict=strict)

    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        node.target for node in bare.graph.nodes if node.op == "call_function"
    ]
    assert list(program.state_dict) == list(bare.state_dict)
    assert torch.equal(program.module()(x), model(x))
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.matrix("compile")
def test_copies_of_a_compiled_model_carry_nothing_of_ours(watch: Watch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    forward = torch.compile(model, backend="aot_eager")
    step = usual(forward, optimizer)
    step(torch.randn(4, 6))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)

    for twin in (copy.deepcopy(model), copy.deepcopy(forward), torch.load(file, weights_only=False)):
        torch.compile(twin, backend="aot_eager")(torch.full((4, 6), 1e6)).sum().backward()
        assert not any(
            isinstance(hook, points.LayerOutput) for m in twin.modules() for hook in m._forward_hooks.values()
        )
    step(torch.randn(4, 6))
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.activation_max_abs is not None
    assert monitor.report.activation_max_abs < 100


@pytest.mark.matrix("compile")
def test_after_close_compiled_code_goes_on_without_us(watch: Watch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    step = whole(model, optimizer)
    step(torch.randn(4, 6))
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]

    monitor.close()
    for _ in range(3):
        step(torch.randn(4, 6))

    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert monitor.report is None or monitor.report.step == 1


@pytest.mark.matrix("compile-late")
@pytest.mark.parametrize("prepare", [whole, method, regional, with_loss], ids=lambda prepare: prepare.__name__)
def test_what_was_compiled_before_is_measured_from_the_next_step(watch: Watch, prepare: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = prepare(model, optimizer)
    step(torch.randn(4, 6))
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]

    monitor = watch(model, optimizer)
    step(torch.randn(4, 6))
    assert monitor.flush()
    anew = dynamo.utils.counters["stats"]["unique_graphs"]
    monitor.close()
    step(torch.randn(4, 6))

    assert monitor.report is not None
    assert all(row.activation_rms is not None for row in monitor.report.layers.rows())
    assert anew == 2 * graphs
    assert dynamo.utils.counters["stats"]["unique_graphs"] == anew
    assert all(type(module._parameters) is dict for module in model.modules())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "gradexporter"]


@pytest.mark.matrix("compile-late")
@pytest.mark.parametrize("of", [lambda model, forward: model, lambda model, forward: forward], ids=["model", "wrapper"])
def test_hooks_that_compiled_code_passes_over_are_reported_where_compiling_anew_would_raise(
    watch: Watch, caplog: pytest.LogCaptureFixture, of: Any
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = torch.compile(model, backend="aot_eager")
    step = usual(forward, optimizer)
    step(torch.randn(4, 6))

    with torch.compiler.set_stance("fail_on_recompile"), caplog.at_level(logging.WARNING, "gradexporter"):
        monitor = watch(of(model, forward), optimizer)
        for _ in range(4):
            step(torch.randn(4, 6))
        assert monitor.flush()
        assert monitor.snapshot is not None
        before = monitor.snapshot.itself.signal_available["activation"]
    torch.compiler.reset()
    step(torch.randn(4, 6))
    assert monitor.flush()

    assert before is False
    assert monitor.snapshot.itself.signal_available["activation"] is True
    assert said(caplog) == [
        "gradexporter: outputs of 5 layers (blocks.0.linear, blocks.0.norm, blocks.1.linear, ...) are not seen: they "
        "run in code that torch.compile made before watch(), and such code never calls a hook that came later. Call "
        "watch() before the first compiled step, or torch.compiler.reset() once after it, which compiles anew. "
        "Gradients, parameters and optimizer state are measured all the same."
    ]


@pytest.mark.matrix("compile-late")
@pytest.mark.parametrize("prepare", [usual, whole, with_loss], ids=lambda prepare: prepare.__name__)
def test_layers_whose_forward_never_runs_are_not_taken_for_compiled_too_early(
    watch: Watch, caplog: pytest.LogCaptureFixture, prepare: Any
) -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.linear.weight, self.linear.bias)

    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    model = ByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with caplog.at_level(logging.WARNING, "gradexporter"):
        monitor = watch(model, optimizer)
        step = prepare(model, optimizer)
        for _ in range(4):
            step(torch.randn(4, 6))
        assert monitor.flush()

    assert said(caplog) == []


def test_rows_that_a_device_adds_up_are_read_like_what_the_host_measures(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation of accelerators, here on tensors of the host."""
    own = library.Library("gradexporter", "IMPL")
    own.impl("added", compiled._added, "CPU")
    expected = train(Net, usual, watch)

    def marked(point: Any, place: torch.device) -> compiled.Mark | None:
        made = compiled.Mark(point, place)
        if isinstance(point, points.LayerOutput):
            made.row = stats.device.new_row(place)
            compiled._points[-made.row.data_ptr()] = point
        return made

    monkeypatch.setattr(compiled, "mark", marked)
    monkeypatch.setattr(compiled, "in_use", set())
    found = train(Net, whole, watch)
    own._destroy()

    for layer, row in expected.rows.items():
        assert found.rows[layer][:4] == pytest.approx(row[:4], rel=1e-5)
    assert [row[4] for row in found.rows.values()] == sorted(row[4] or 0.0 for row in found.rows.values())


class Pooled(nn.Module):
    """A normalisation that inductor fuses into the pooling behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None] * torch.linspace(-1, 1, 256).view(16, 16)
        return self.head(nn.functional.silu(self.norm(self.convolution(image))).mean((2, 3)))


def test_inductor_computes_the_same_with_and_without_us(watch: Watch) -> None:
    prepare = functools.partial(whole, backend="inductor", fullgraph=True)
    bare = train(Pooled, prepare)
    watched = train(Pooled, prepare, watch)

    expected = train(Pooled, usual, watch).rows
    fused = watched.rows.pop("norm")
    assert fused[:4] == (None, None, None, None)
    assert fused[5] == pytest.approx(expected.pop("norm")[5], rel=1e-4)
    assert [row[4] for row in watched.rows.values()] == [0, 1]
    for layer, row in watched.rows.items():
        assert [*row[:4], *row[5:]] == pytest.approx([*expected[layer][:4], *expected[layer][5:]], rel=1e-4)
    assert watched.graphs == bare.graphs
    assert watched.losses == bare.losses
    assert all(map(torch.equal, watched.parameters, bare.parameters))
