"""Loops that are not the usual one: what they do to us, and that we do nothing to them."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradexporter
from gradexporter.monitor import Monitor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor | None = None) -> Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 6) if x is None else x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.matrix("checkpointing")
def test_selective_checkpointing_sees_none_of_our_operations(watch: Callable[..., Monitor]) -> None:
    policy = [torch.ops.aten.addmm.default, torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.aminmax.default]
    context = functools.partial(create_selective_checkpoint_contexts, policy)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            return self.b(a / torch.linalg.vector_norm(a, dim=-1, keepdim=True))

    def gradients(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watched:
            watch(model, optimizer)
        checkpoint(model, torch.ones(2, 6), use_reentrant=False, context_fn=context).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.matrix("checkpointing")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_measured_once(watch: Callable[..., Monitor], reentrant: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    x = torch.ones(2, 6, requires_grad=True)

    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    optimizer.step()
    assert monitor.flush()
    report = monitor.report

    assert report is not None
    outputs = net()[0](x).detach()
    row = next(report.layers.rows())
    assert row.activation_rms == pytest.approx(outputs.square().mean().sqrt().item(), rel=1e-6)
    assert row.gradient_norm is not None


@pytest.mark.matrix("checkpointing")
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_in_a_backward_is_not_counted_twice(
    watch: Callable[..., Monitor], reentrant: bool
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    x = torch.full((2, 6), math.inf, requires_grad=True)

    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    optimizer.step()
    assert monitor.flush()
    report = monitor.report

    assert report is not None
    with torch.no_grad():
        first = net()[0](x)
        outputs = [first, net()[2](torch.relu(first))]
    counts = [tensor.numel() - int(torch.isfinite(tensor).sum()) for tensor in outputs]
    assert counts[0] > 0
    assert [row.activation_nonfinite for row in report.layers.rows()] == counts


@pytest.mark.matrix("outputs")
def test_each_call_of_a_layer_in_a_step_is_counted_once(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    batches = [torch.full((2, 6), math.inf), torch.ones(3, 6)]
    sum(model(batch).sum() for batch in batches).backward()
    optimizer.step()
    assert monitor.flush()

    assert monitor.report is not None
    assert next(monitor.report.layers.rows()).activation_nonfinite == 16


@pytest.mark.matrix("accumulation")
def test_of_accumulated_backwards_one_is_measured_once_their_number_is_known(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, activation_every=1000, state_every=1000, kernels="stock")  # whose calls show

    def update(backwards: int) -> tuple[float, int]:
        optimizer.zero_grad()
        with torch.profiler.profile() as profile:
            for scale in range(1, backwards + 1):
                model(torch.full((2, 6), float(scale))).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])).item()
            optimizer.step()
        assert monitor.flush()
        assert monitor.report is not None
        assert monitor.report.gradient_norm == pytest.approx(norm, rel=1e-5)
        return norm, sum(event.count for event in profile.key_averages() if event.key == "aten::_foreach_norm")

    monitor.observe(None, inputs=torch.ones(1))  # from now on the model's own inputs are not measured
    update(1)  # also the full pass over the state that a first step has
    passes = [update(backwards)[1] for backwards in (4, 4, 4, 2, 2, 6, 6)]

    # Each pass is one call, and the clip factor reads one parameter again before the update.
    assert [count - 1 for count in passes] == [4, 1, 1, 0, 1, 5, 1]


def test_a_fast_path_of_evaluation_is_left_alone(watch: Callable[..., Monitor]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = Encoder(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(4, 7, 32)
    mask = torch.zeros(4, 7, dtype=torch.bool)
    mask[:, 5:] = True
    model.eval()
    with torch.no_grad():
        bare = model(x, mask)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)

    model.eval()
    with torch.no_grad():
        watched = model(x, mask)
    model.train()
    model(x, mask).square().mean().backward()
    optimizer.step()
    assert monitor.flush()

    assert torch.equal(watched, bare)
    assert monitor.report is not None
    assert all(row.activation_rms is not None for row in monitor.report.layers.rows() if "linear" in row.layer)


class Encoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=mask)


def test_what_a_signal_handler_of_the_users_raises_reaches_the_user(watch: Callable[..., Monitor]) -> None:
    class TimeUp(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TimeUp

    class Slow(nn.Linear):
        """Its output rings the alarm when it is looked at, which is inside our hook."""

        def forward(self, x: Tensor) -> Any:
            return Ringing(super().forward(x))

    class Ringing(dict):  # type: ignore[type-arg]
        def __init__(self, out: Tensor) -> None:
            super().__init__(out=out)

        @property
        def __class__(self) -> type:
            signal.raise_signal(signal.SIGALRM)
            return dict

    before = signal.signal(signal.SIGALRM, handler)
    try:
        model = Slow(6, 3)
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(TimeUp):
            model(torch.ones(2, 6))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_forward_leaves_nothing_behind(watch: Callable[..., Monitor]) -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.armed = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.armed:
                raise KeyboardInterrupt
            return y

    model = Interrupted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 6))
    model.eval()
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(torch.ones(2, 6))
    model.armed = False
    model.train()
    step(model, optimizer)
    model.eval()
    with torch.no_grad():
        model(torch.full((2, 6), 1e6))
    model.train()
    step(model, optimizer)
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.step == 2
    assert monitor.report.activation_max_abs is not None
    assert monitor.report.activation_max_abs < 10
    assert monitor.snapshot is not None
    assert monitor.snapshot.phase == "train"


def test_a_model_that_trains_in_eval_mode_is_measured_and_in_phase_train(watch: Callable[..., Monitor]) -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.activation_max_abs is not None
    assert monitor.snapshot is not None
    assert monitor.snapshot.phase == "train"


@pytest.mark.matrix("optimizers")
def test_a_module_added_with_its_parameters_is_a_layer_from_then_on(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    step(model, optimizer)
    model.append(nn.Linear(3, 2))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    for _ in range(2):
        step(model, optimizer)
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.step == 3
    assert [row.layer for row in monitor.report.layers.rows() if row.activation_rms is not None] == ["0", "2", "3"]


@pytest.mark.matrix("optimizers")
def test_parameters_outside_the_model_are_part_of_the_gradient(watch: Callable[..., Monitor]) -> None:
    model = nn.Linear(6, 3)
    temperature = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    monitor = watch(model, optimizer)

    (model(torch.ones(2, 6)) * temperature).sum().backward()
    norm = torch.stack([p.grad.norm() for p in (*model.parameters(), temperature) if p.grad is not None]).norm().item()
    optimizer.step()
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.gradient_norm == pytest.approx(norm, rel=1e-6)
    assert "(other)" in monitor.report.layers.names


def test_a_parameter_of_the_root_is_not_blamed_for_what_a_layer_after_it_lost(watch: Callable[..., Monitor]) -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(6))
            self.body = nn.Linear(6, 6)
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x + self.position))

    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    (model(torch.ones(2, 6)).sum() * math.nan).backward()
    optimizer.step()
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.first_nonfinite is not None
    assert (monitor.report.first_nonfinite.layer, monitor.report.first_nonfinite.quantity) == ("head", "gradient")


@pytest.mark.matrix("closure")
def test_a_closure_that_clears_the_gradient_is_no_clipping(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert monitor.flush()

    assert monitor.snapshot is not None
    assert monitor.snapshot.clipped_steps == 0
    assert monitor.snapshot.steps_applied == 5


@pytest.mark.matrix("parameters")
@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False), id="integers"),
        pytest.param(lambda: nn.Parameter(torch.empty(0)), id="empty"),
        pytest.param(lambda: nn.Parameter(torch.ones(3, device="meta")), id="meta"),
    ],
)
def test_a_parameter_without_values_costs_no_step(
    watch: Callable[..., Monitor], odd: Callable[[], nn.Parameter]
) -> None:
    model = net()
    model.odd = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    assert monitor.flush()

    assert monitor.report is not None
    assert monitor.report.step == 3
    assert monitor.report.gradient_norm is not None


@pytest.mark.matrix("parameters")
def test_sparse_and_complex_gradients_are_measured(watch: Callable[..., Monitor]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, index: Tensor) -> Tensor:
            return (self.table(index) * self.phase.conj()).abs().sum()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    for index in ([1, 1, 2], []):
        optimizer.zero_grad()
        model(torch.tensor(index, dtype=torch.long)).backward()
        expected = math.hypot(model.table.weight.grad.to_dense().norm().item(), model.phase.grad.abs().norm().item())
        optimizer.step()
        assert monitor.flush()
        assert monitor.report is not None
        assert monitor.report.gradient_norm == pytest.approx(expected, rel=1e-5)


def test_faults_before_any_step_are_in_the_series() -> None:
    model = net()
    with gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False) as monitor:
        monitor.observe("no loss")
        monitor.checkpoint_saved(step="no step")  # type: ignore[arg-type]
        with monitor.phase("lunch"):
            pass
        assert monitor.flush()

        assert monitor.snapshot is not None
        assert monitor.snapshot.itself.failures["observe"] == 3


def test_a_batch_of_a_million_numbers_is_not_walked(watch: Callable[..., Monitor]) -> None:
    looked = 0

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            nonlocal looked
            found = super().__getitem__(at)
            looked += len(found) if isinstance(at, slice) else 1
            return found

    model = net()
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monitor.observe(1.0, inputs={"x": torch.ones(2), "ids": Counting(range(10**6))})

    assert looked <= 1024


def test_a_closed_monitor_keeps_no_parameter_and_a_copied_one_watches_nothing() -> None:
    model = net()
    monitor = gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False)
    for twin in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert twin.snapshot is None
    monitor.close()
    parameter = model[0].weight
    references = sys.getrefcount(parameter)
    del model

    assert sys.getrefcount(parameter) < references


@pytest.mark.matrix("copies")
def test_a_model_saved_while_watched_loads_where_gradexporter_is_not(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False):
        torch.save(model, tmp_path / "model.pt")
    script = f"""
        import sys
        sys.modules["gradexporter"] = None
        import torch
        model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert model(torch.ones(2, 6)).shape == (2, 3)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.matrix("copies")
def test_a_model_saved_while_watched_loads_with_the_classes_that_are_safe_when_nobody_watches(tmp_path: Any) -> None:
    safe = [nn.Sequential, nn.TransformerEncoderLayer, nn.Linear, nn.LayerNorm, nn.Dropout, nn.MultiheadAttention]
    safe += [nn.modules.linear.NonDynamicallyQuantizableLinear, nn.functional.relu]
    model = nn.Sequential(nn.Linear(6, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0))
    with gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False):
        torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals(safe):
        loaded = torch.load(tmp_path / "model.pt")

    x = torch.ones(2, 6)
    assert torch.equal(loaded(x), model(x))
    assert vars(loaded).keys() == vars(model).keys()


class Stateful(nn.Linear):
    """A module that has its own idea of what is saved."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "saved": True}


@pytest.mark.matrix("copies")
def test_copies_keep_the_hooks_and_the_state_of_the_user(watch: Callable[..., Monitor]) -> None:
    model = nn.Sequential(Stateful(6, 3), nn.Tanh())
    model[0].register_forward_hook(_doubled, with_kwargs=True)
    model.register_forward_pre_hook(_halved)
    keys = set(vars(model))
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 6)
    expected = model(x)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        assert twin[0].saved is True
        assert [len(part._forward_hooks) for part in twin.modules()] == [0, 1, 0]
        assert [len(part._forward_hooks_with_kwargs) for part in twin.modules()] == [0, 1, 0]
        assert [len(part._forward_pre_hooks) for part in twin.modules()] == [1, 0, 0]
        assert not twin._forward_pre_hooks_with_kwargs
        assert not twin._forward_hooks_always_called
        assert set(vars(twin)) == keys
    monitor.close()
    assert set(vars(model)) == keys


def _doubled(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return 2 * output


def _halved(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2,)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_watched_model_can_be_traced(watch: Callable[..., Monitor]) -> None:
    model = net()
    watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 6)

    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.matrix("copies")
def test_a_forked_child_that_drops_the_model_does_not_hang() -> None:
    script = """
        import gc, os, torch, gradexporter
        from torch import nn
        torch.set_num_threads(1)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = gradexporter.watch(model, optimizer, host="127.0.0.1", port=0)
        for _ in range(20):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            child = os.fork()
            if child == 0:
                del model, optimizer, monitor
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert monitor.flush() and monitor.report.step == 20
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60, env=os.environ)
