"""Capture: from the events of a training loop to one Pending a step.

Runs on the trainer thread. Every entry point is fenced: a fault of ours is counted and training goes on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradexporter import stats
from gradexporter.config import Config
from gradexporter.fence import Fence
from gradexporter.hooks import points, scaler
from gradexporter.hooks.cadence import Cadence
from gradexporter.hooks.layers import Layer, find_layers
from gradexporter.readback import Number, Pending, Plan, closed_on, pack

Method = TypeVar("Method", bound=Callable[..., None])


def fenced(method: Method) -> Method:
    """Counts a fault of ours instead of raising it, and the time that we took."""

    @functools.wraps(method)
    def guarded(self: Capture, *args: Any, **kwargs: Any) -> None:
        if not self.alive:
            return
        began = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            self.seconds += time.perf_counter() - began

    return cast(Method, guarded)


class Watched:
    """One optimizer: its parameters, how they fold into layers, and the gradient of the step being built."""

    def __init__(self, index: int, optimizer: Optimizer, layers: Sequence[Layer], leftovers: frozenset[int]) -> None:
        self.index = index
        self.optimizer = optimizer
        self._layers = layers
        self._leftovers = leftovers
        self.block: stats.Block | None = None
        """Gradient statistics of the step being built; a later end of backward replaces them."""
        self.positions: tuple[int, ...] = ()
        self.scaled = True
        self.scale: Tensor | None = None
        self.stepping = False
        """Whether the optimizer's own hooks fired since a scaler announced a step."""
        self.clip: Number | None = None
        self.found_inf: Tensor | None = None
        self.rates: list[Number] = []
        self.refresh()

    def refresh(self) -> list[nn.Parameter]:
        """Takes in the parameters that the groups hold now; returns those that are new."""
        before = {id(parameter) for parameter in getattr(self, "parameters", ())}
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self.held = sum(len(group["params"]) for group in self.optimizer.param_groups)
        names: list[str] = []
        indexes: list[int] = []
        owners: list[int] = []
        self.parameters: list[nn.Parameter] = []
        for index, layer in enumerate(self._layers):
            mine = [parameter for parameter in layer.parameters if id(parameter) in held and parameter.numel()]
            if mine or index in self._leftovers:
                owners += [len(names)] * len(mine)
                names.append(layer.name)
                indexes.append(index)
                self.parameters += mine
        self.plan = Plan(tuple(names), tuple(indexes), np.array(owners, dtype=np.intp))
        self.everything = tuple(range(len(self.parameters)))
        self._layouts: dict[tuple[int, ...], stats.host.Layout] = {}
        sizes = [parameter.numel() for parameter in self.parameters]
        self.reference = min(range(len(sizes)), key=sizes.__getitem__, default=-1)
        return [parameter for parameter in self.parameters if id(parameter) not in before]

    def layout(self, positions: tuple[int, ...]) -> stats.host.Layout:
        """How tensors shaped like these parameters are reduced together."""
        layout = self._layouts.get(positions)
        if layout is None:
            if len(self._layouts) > 16:  # a loop that never touches the same parameters twice
                self._layouts.clear()
            layout = stats.host.Layout([self.parameters[at].shape for at in positions])
            self._layouts[positions] = layout
        return layout


class Capture:
    """The hooks on one model and its optimizers; symmetric ``attach`` and ``detach``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: Config,
        fence: Fence,
        cadence: Cadence,
        submit: Callable[[Pending], None],
        phase: Callable[[str], None],
    ) -> None:
        """``submit`` takes a sealed step and ``phase`` a change of phase; both return at once."""
        self.fence = fence
        self.alive = False
        self.seconds = 0.0
        self.layers = find_layers(model, parameterless=config.activations == "all")
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        free = (i for i, layer in enumerate(self.layers) if not any(id(p) in held for p in layer.parameters))
        leftovers = frozenset(free)  # frozen or parameterless layers go with the first optimizer
        self._watched = [
            Watched(index, optimizer, self.layers, leftovers if index == 0 else frozenset())
            for index, optimizer in enumerate(optimizers)
        ]
        self.signals = {"gradient": True, "pre_clip": True, "activation": True, "update_ratio": True, "loss": False}
        self.monitor: object = None
        """Whoever must live as long as the hooks do."""
        self._model = model
        self._cadence = cadence
        self._submit = submit
        self._phase = phase
        self._phase_now = "train"
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._next = config.start_step
        self._closed: Pending | None = None
        self._closed_before: float | None = None
        self._losses: list[Number] = []
        self._loss_comes_first = False
        self._backward_seen = False
        self._ranges: dict[str, list[stats.Block]] = {"input": [], "target": []}
        self._sources: dict[str, bool] = {"input": False, "target": False}
        self._depth = 0
        self._training = True
        self._rank = 0
        self._order = [-1.0] * len(self.layers)  # lists: setting one number is faster than in an array
        self._dtypes = [torch.float32] * len(self.layers)
        self._accumulators: dict[torch.device, stats.host.Accumulator | stats.device.Accumulator] = {}
        self._activation_seconds = 0.0
        self._full_activations = cadence.full("activation", self._next)

    @property
    def last_step(self) -> int | None:
        """Number of the last closed step; None before the first."""
        return None if self._closed_before is None else self._next - 1

    # -- attaching ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Sets every hook; raises what torch raises, with nothing left behind."""
        try:
            for index, layer in enumerate(self.layers):
                self._hold(layer.module.register_forward_hook(points.LayerOutput(self, index)))
            self._hold(self._model.register_forward_pre_hook(points.Entering(self), with_kwargs=True))
            self._hold(self._model.register_forward_hook(points.Leaving(self), always_call=True))
            for watched in self._watched:
                self._watch_parameters(watched, watched.parameters)
                self._hold(watched.optimizer.register_step_pre_hook(functools.partial(_before, self, watched)))
                self._hold(watched.optimizer.register_step_post_hook(functools.partial(_after, self, watched)))
            scaler.listen(self)
        except BaseException:
            self.detach()
            raise
        self.alive = True

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        self.alive = False
        scaler.unlisten(self)
        while self._handles:
            self._handles.pop().remove()

    def _hold(self, handle: Any) -> None:
        self._handles.append(handle)

    def _watch_parameters(self, watched: Watched, parameters: Sequence[nn.Parameter]) -> None:
        hook = points.Accumulated(self, watched)
        for parameter in parameters:
            if parameter.requires_grad:
                self._hold(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    # -- forward --------------------------------------------------------------------------------

    @fenced
    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The watched model is about to run."""
        self._depth += 1
        if self._depth > 1:
            return
        self._training = module.training and torch.is_grad_enabled()
        phase = "train" if module.training else "eval"
        if phase != self._phase_now:
            self._phase_now = phase
            self._phase(phase)
        if self._training:
            self.seal()
            if not self._sources["input"]:
                self._measure_range("input", (args, kwargs))

    @fenced
    def leaving(self) -> None:
        """The watched model has run, or raised."""
        self._depth = max(0, self._depth - 1)

    def layer_output(self, layer: int, output: Any) -> None:
        """One layer has returned ``output``."""
        if not self.alive or torch._C._current_graph_task_id() != -1:
            return  # inside a backward a forward only recomputes what was measured already
        if torch._C._are_functorch_transforms_active():
            return  # a tensor under vmap or grad has no value yet
        if not (self._training if self._depth else self._model.training and torch.is_grad_enabled()):
            return
        began = time.perf_counter()
        try:
            if self._closed is not None:
                self.seal()
            if type(output) is Tensor and output.dtype in stats.ORDINARY_DTYPES and output.device.type != "meta":
                self._add_output(layer, output.detach())
            else:
                for tensor in floating(output):
                    self._add_output(layer, stats.plain(tensor))
            self._order[layer] = self._rank
            self._rank += 1
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            spent = time.perf_counter() - began
            self.seconds += spent
            self._activation_seconds += spent

    def _add_output(self, layer: int, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        accumulator = self._accumulators.get(tensor.device)
        if accumulator is None:
            on_host = tensor.device.type == "cpu"
            size = len(self.layers)
            accumulator = stats.host.Accumulator(size) if on_host else stats.device.Accumulator(size, tensor.device)
            self._accumulators[tensor.device] = accumulator
        self._dtypes[layer] = tensor.dtype
        accumulator.add(layer, tensor, full=self._full_activations)

    # -- backward -------------------------------------------------------------------------------

    @fenced
    def backward_began(self) -> None:
        """The first gradient of a backward was accumulated."""
        self.seal()
        self._backward_seen = True

    @fenced
    def backward_ended(self, watched: Watched) -> None:
        """A backward that touched this optimizer's parameters is complete, reductions over ranks included."""
        self._measure_gradients(watched)
        watched.scaled = True

    def _measure_gradients(self, watched: Watched) -> None:
        gradients = [parameter.grad for parameter in watched.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            watched.positions = watched.everything
        else:
            watched.positions = tuple(at for at, gradient in enumerate(gradients) if gradient is not None)
        watched.block = stats.measure(present, watched.layout(watched.positions)) if present else None

    # -- update ---------------------------------------------------------------------------------

    @fenced
    def scaler_steps(self, scaling: GradScaler, optimizer: Optimizer) -> None:
        """A scaler is about to unscale, check and perhaps apply the update of ``optimizer``."""
        for watched in self._watched:
            if watched.optimizer is optimizer:
                watched.stepping = False
                watched.scale = scaler.scale_of(scaling)

    @fenced
    def scaler_stepped(self, scaling: GradScaler, optimizer: Optimizer) -> None:
        """The scaler is done; when the optimizer's hooks did not fire, it skipped the update."""
        for watched in self._watched:
            if watched.optimizer is optimizer and not watched.stepping:
                watched.rates = _rates(optimizer)
                self._close(watched, applied=False)

    @fenced
    def step_begins(self, watched: Watched, closure: bool) -> None:
        """``optimizer.step()`` is about to change the parameters."""
        self.seal()
        watched.stepping = True
        optimizer = watched.optimizer
        if sum(len(group["params"]) for group in optimizer.param_groups) != watched.held:
            self._watch_parameters(watched, watched.refresh())
            watched.block = None
        if watched.block is None and not closure:
            self._measure_gradients(watched)
            watched.scaled = getattr(optimizer, "grad_scale", None) is not None
            self.signals["pre_clip"] = False
        else:
            self._read_again(watched)
            self.signals["pre_clip"] = True
        watched.found_inf = getattr(optimizer, "found_inf", None)
        watched.rates = _rates(optimizer)

    def _read_again(self, watched: Watched) -> None:
        still_scaled = getattr(watched.optimizer, "grad_scale", None) is not None
        gradient = watched.parameters[watched.reference].grad if watched.reference in watched.positions else None
        if gradient is not None and not still_scaled:
            block = stats.measure([gradient])
            watched.clip = block[0, 0]

    @fenced
    def step_ended(self, watched: Watched) -> None:
        """``optimizer.step()`` has changed the parameters."""
        self._close(watched, applied=True)

    def _close(self, watched: Watched, *, applied: bool) -> None:
        self.seal()
        now = time.monotonic()
        pending = Pending(
            step=self._next,
            optimizer=watched.index,
            plan=watched.plan,
            applied=applied,
            started=self._closed_before,
            closed=now,
            timestamp=time.time(),
            losses=self._losses,
            rates=watched.rates,
            scaled=watched.scaled,
        )
        if watched.block is not None:
            pending.blocks["gradients"] = watched.block
            pending.gradients = watched.positions
        self._close_numbers(watched, pending)
        self._close_activations(watched, pending)
        state_seconds = self._close_state(watched, pending, applied)
        activation_seconds, self._activation_seconds = self._activation_seconds, 0.0
        self._cadence.spent(
            None if self._closed_before is None else now - self._closed_before,
            state=state_seconds,
            activation_full=activation_seconds if self._full_activations else None,
            activation_sentinel=None if self._full_activations else activation_seconds,
        )
        watched.block, watched.scale, watched.clip, watched.found_inf = None, None, None, None
        self._losses = []
        self._backward_seen = False
        self._next += 1
        self._closed_before = now
        self._full_activations = self._cadence.full("activation", self._next)
        closed_on(pending)
        self._closed = pending

    def _close_numbers(self, watched: Watched, pending: Pending) -> None:
        if watched.scale is not None:
            pending.numbers["loss_scale"] = watched.scale
        if watched.found_inf is not None:
            pending.numbers["found_inf"] = watched.found_inf.detach().clone().reshape(())
        if watched.clip is not None:
            pending.numbers["clip"] = watched.clip
            pending.reference = watched.positions.index(watched.reference)
        for name, ranges in self._ranges.items():
            if ranges:
                pending.numbers[f"{name}_max_abs"], pending.numbers[f"{name}_nonfinite"] = stats.extremes(ranges)
        self._ranges = {"input": [], "target": []}

    def _close_activations(self, watched: Watched, pending: Pending) -> None:
        pending.order = np.array([self._order[index] for index in watched.plan.indexes])
        pending.dtype_max = np.array([_largest(self._dtypes[index]) for index in watched.plan.indexes])
        for place, accumulator in self._accumulators.items():
            pending.blocks[f"activations {place}"] = accumulator.take(watched.plan.indexes)
        self.signals["activation"] = bool((pending.order >= 0).any())
        for index in watched.plan.indexes:
            self._order[index] = -1.0
        self._rank = 0

    def _close_state(self, watched: Watched, pending: Pending, applied: bool) -> float | None:
        if not self._cadence.full("state", pending.step) or not watched.parameters:
            return None
        began = time.perf_counter()
        pending.blocks["parameters"] = stats.measure(watched.parameters, watched.layout(watched.everything))
        moments = dict(
            zip(("momentum", "second_moment"), stats.state_lists(watched.optimizer, watched.parameters), strict=True)
        )
        there = {name: [(at, m) for at, m in enumerate(listed) if m is not None] for name, listed in moments.items()}
        pending.moments = {name: tuple(at for at, _ in pairs) for name, pairs in there.items() if pairs}
        for name in pending.moments:
            listed = [moment for _, moment in there[name]]
            pending.blocks[name] = stats.measure(listed, watched.layout(pending.moments[name]), norms=False)
        if applied:
            self._close_updates(watched, pending)
        return time.perf_counter() - began

    def _close_updates(self, watched: Watched, pending: Pending) -> None:
        rebuilt = stats.update_norms(watched.optimizer, watched.parameters)
        self.signals["update_ratio"] = rebuilt is not None
        if rebuilt is not None:
            pending.updates, pending.blocks["updates"] = rebuilt

    # -- observing and sealing --------------------------------------------------------------------

    def observe(self, loss: Number | None, inputs: Any, targets: Any) -> None:
        """Adds a loss and the ranges of a batch to the step being built, or to the one just closed."""
        with self._lock:
            if loss is not None:
                # Where the forward is not seen (compiled before us), a loop that observes before its backward
                # must not give this loss to the step before.
                if self._closed is None:
                    self._loss_comes_first = not self._backward_seen
                elif self._loss_comes_first:
                    self.seal()
                (self._losses if self._closed is None else self._closed.losses).append(loss)
                self.signals["loss"] = True
            for name, batch in (("input", inputs), ("target", targets)):
                if batch is not None:
                    self._sources[name] = True
                    self._measure_range(name, batch)

    def _measure_range(self, name: str, batch: Any) -> None:
        tensors = [tensor for tensor in map(stats.plain, floating(batch)) if tensor.numel()]
        if tensors:
            self._ranges[name].append(stats.measure(tensors))

    def seal(self, older_than: float = 0.0) -> None:
        """Hands the closed step over, if there is one and it closed ``older_than`` seconds ago."""
        if self._closed is None:
            return
        with self._lock:
            closed = self._closed
            if closed is None or time.monotonic() - closed.closed < older_than:
                return
            self._closed = None
            pack(closed)
            self._submit(closed)


def _before(capture: Capture, watched: Watched, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
    capture.step_begins(watched, bool(kwargs.get("closure") or len(args) > 1))


def _after(capture: Capture, watched: Watched, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
    capture.step_ended(watched)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _rates(optimizer: Optimizer) -> list[Number]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return [rate.detach().clone().reshape(()) if isinstance(rate, Tensor) else float(rate) for rate in rates]


def floating(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The floating tensors of a nested structure of sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        valued = not (value.is_meta or value.is_nested)
        if valued and (value.dtype in stats.FLOATING or value.is_complex()):
            yield value
    elif depth < 8:
        if isinstance(value, Mapping):
            value = tuple(value.values())
        elif is_dataclass(value) and not isinstance(value, type):
            value = tuple(getattr(value, item.name, None) for item in fields(value))
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from floating(item, depth + 1)
