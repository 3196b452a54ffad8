"""Capture: from the events of a training loop to one Pending a step.

Runs on the trainer thread. Every entry point is fenced: a fault of ours is counted and training goes on.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from gradexporter import stats
from gradexporter.config import Config
from gradexporter.fence import Fence
from gradexporter.hooks import points, scaler
from gradexporter.hooks.attachment import LayerHooks
from gradexporter.hooks.batch import MOST_PARTS, floating, valueless
from gradexporter.hooks.cadence import Cadence
from gradexporter.hooks.layers import find_layers
from gradexporter.hooks.outputs import Outputs
from gradexporter.hooks.restart import Restart
from gradexporter.hooks.shares import find_sharding
from gradexporter.hooks.watched import Watched, held_by
from gradexporter.readback import Number, Pending, closed_on, pack
from gradexporter.records import Signature

_log = logging.getLogger("gradexporter")

Method = TypeVar("Method", bound=Callable[..., None])


def quietly(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls out of sight of the user's dispatch modes: selective checkpointing, a counter of operations."""
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            function(*args, **kwargs)
    else:
        function(*args, **kwargs)


def fenced(method: Method) -> Method:
    """Counts a fault of ours instead of raising it, and the time that we took."""

    @functools.wraps(method)
    def guarded(self: Capture, *args: Any, **kwargs: Any) -> None:
        if not self.alive or valueless():
            return
        began = time.perf_counter()
        try:
            quietly(method, self, *args, **kwargs)
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            self.seconds += time.perf_counter() - began

    return cast(Method, guarded)


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
        self.signals = {"gradient": True, "pre_clip": True, "activation": True, "update_ratio": True, "loss": False}
        self.monitor: object = None
        """Whoever must live as long as the hooks do."""
        self._model: nn.Module | None = model
        self._optimizers = list(optimizers)
        self._parameterless = config.activations == "all"
        self._cadence = cadence
        self._submit = submit
        self._phase = phase
        self._phase_now = "train"
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._layer_hooks = LayerHooks()
        self._next = config.start_step
        self._closed: Pending | None = None
        self._closed_before: float | None = None
        self._losses: collections.deque[Number] = collections.deque(maxlen=MOST_PARTS)
        self._loss_comes_first = False
        self._backward_seen = False
        self._ranges: dict[str, list[stats.Block]] = {"input": [], "target": []}
        self._sources: dict[str, bool] = {"input": False, "target": False}
        self._in_training_forward = False
        self._trained_in = {True: False, False: False}
        self._trains_in_eval = False
        self._activation_seconds = 0.0
        self._full_activations = cadence.full("activation", self._next)
        goes_on = config.start_step > 1
        self._restarts = {index: Restart() for index in range(len(self._optimizers))} if goes_on else {}
        self._unknown_said = False
        self._survey(model)

    def _survey(self, model: nn.Module) -> None:
        """Finds layers and parameters as they are now."""
        parameters = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        sharding = find_sharding(model)
        self.norms = "share" if sharding is not None and sharding.partial else "global"
        self.layers = find_layers(model, parameters, sharding, parameterless=self._parameterless)
        held = {id(parameter) for parameter in parameters}
        free = (i for i, layer in enumerate(self.layers) if not any(id(p) in held for p in layer.parameters))
        leftovers = frozenset(free)  # frozen or parameterless layers go with the first optimizer
        self._watched = [
            Watched(index, optimizer, self.layers, leftovers if index == 0 else frozenset(), sharding)
            for index, optimizer in enumerate(self._optimizers)
        ]
        self._outputs = Outputs(len(self.layers))

    @property
    def last_step(self) -> int | None:
        """Number of the last closed step; None before the first."""
        return None if self._closed_before is None else self._next - 1

    @property
    def next_step(self) -> int:
        """Number of the step that is being built."""
        return self._next

    def signatures(self) -> tuple[Signature, ...]:
        """What must be the same, by optimizer, in a run that goes on with the baselines of this one."""
        return tuple(watched.signature() for watched in self._watched)

    def resume(self, step: int) -> None:
        """The next step is number ``step`` of a run that goes on."""
        self._next = step
        self._restarts = {index: Restart() for index in range(len(self._optimizers))}
        self._full_activations = self._cadence.full("activation", step)

    # -- attaching ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Sets every hook; raises what torch raises, with nothing left behind."""
        assert self._model is not None
        try:
            self._layer_hooks.attach(self, self._model, self._watched)
            self._hold(self._model.register_forward_pre_hook(points.Entering(self), with_kwargs=True))
            self._hold(self._model.register_forward_hook(points.Leaving(self), always_call=True))
            me = weakref.ref(self)  # an optimizer alone keeps nothing of ours alive
            for index, optimizer in enumerate(self._optimizers):
                self._hold(optimizer.register_step_pre_hook(functools.partial(_before, me, index)))
                self._hold(optimizer.register_step_post_hook(functools.partial(_after, me, index)))
            scaler.listen(self)
        except BaseException:
            self.detach()
            raise
        self.alive = True

    def watches(self, model: nn.Module) -> bool:
        """Whether this is the capture of ``model``."""
        return self._model is model

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        self.alive = False
        scaler.unlisten(self)
        self._layer_hooks.detach()
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """Lets go of model and optimizers, so that a closed monitor keeps no parameter alive."""
        self._model = None
        self._optimizers, self._watched, self._closed = [], [], None
        self.layers, self._outputs = [], Outputs(0)

    def _hold(self, handle: Any) -> None:
        self._handles.append(handle)

    def _survey_again(self) -> None:
        """A parameter joined or left a group: the layers are found anew."""
        assert self._model is not None
        self._layer_hooks.detach()
        self._survey(self._model)
        self._layer_hooks.attach(self, self._model, self._watched)

    # -- forward --------------------------------------------------------------------------------

    @fenced
    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The watched model is about to run."""
        grad = torch.is_grad_enabled()
        self._in_training_forward = grad and (module.training or self._trains_in_eval)
        if grad:
            self._trained_in[module.training] = True
        self._layer_hooks.shelter(module.training)
        self._enter_phase("train" if module.training or self._in_training_forward else "eval")
        if self._in_training_forward:
            self.seal()
            if not self._sources["input"]:
                self._measure_range("input", (args, kwargs))

    def _enter_phase(self, phase: str) -> None:
        if phase != self._phase_now:
            self._phase_now = phase
            self._phase(phase)

    @fenced
    def leaving(self) -> None:
        """The watched model has run, or raised."""
        self._in_training_forward = False
        self._layer_hooks.shelter(True)

    def _measures(self) -> bool:
        """Whether an output belongs to training; reentrant checkpointing runs its forward without grad mode."""
        if self._in_training_forward:
            return True
        model = self._model
        return torch.is_grad_enabled() and model is not None and (model.training or self._trains_in_eval)

    def layer_output(self, layer: int, output: Any) -> None:
        """One layer has returned ``output``."""
        if not self.alive or valueless():
            return
        if torch._C._current_graph_task_id() != -1:
            # Inside a backward a checkpointed forward is computed again: measured then if it was not before.
            if self._outputs.seen(layer) or not torch.is_grad_enabled():
                return
        elif not self._measures():
            return
        began = time.perf_counter()
        try:
            quietly(self._measure_output, layer, output)
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            spent = time.perf_counter() - began
            self.seconds += spent
            self._activation_seconds += spent

    def _measure_output(self, layer: int, output: Any) -> None:
        if self._closed is not None:
            self.seal()
        self._outputs.add(layer, output, full=self._full_activations)

    # -- backward -------------------------------------------------------------------------------

    @fenced
    def backward_began(self) -> None:
        """The first gradient of a backward was accumulated."""
        self.seal()
        self._backward_seen = True

    @fenced
    def backward_ended(self, watched: Watched) -> None:
        """A backward that touched this optimizer's parameters is complete, reductions over ranks included.

        Of as many backwards as the last update had (accumulation, reentrant checkpoints) only the last is worth a
        pass; an update that comes sooner than that measures for itself, after clipping if there is any.
        """
        watched.backwards += 1
        if watched.backwards < watched.expected_backwards:
            watched.block = None
            return
        self._measure_gradients(watched)
        watched.scaled = True

    def _measure_gradients(self, watched: Watched) -> None:
        watched.measure_gradients()
        self.signals["gradient"] = not watched.unknown
        if watched.unknown and not self._unknown_said:
            self._unknown_said = True
            layers = sorted({watched.plan.layers[owner] for owner in watched.plan.owners[list(watched.unknown)]})
            _log.warning(
                "gradexporter: gradients of %d layers (%s first) are not reduced over ranks when the update reads "
                "them; they are left out, and with them the gradient norm of the model",
                len(layers),
                layers[0],
            )

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
        optimizer = watched.optimizer
        if held_by(optimizer) != watched.held:
            self._survey_again()
            watched = self._watched[watched.index]
        watched.stepping = True
        if watched.index in self._restarts:
            with self.fence.guarding("hooks"):
                self._restarts[watched.index].update_begins(watched)
        if watched.block is None and not closure:
            self._measure_gradients(watched)
            watched.scaled = getattr(optimizer, "grad_scale", None) is not None
            self.signals["pre_clip"] = False
        else:
            if not closure:  # its backward is still to come
                watched.read_again()
            self.signals["pre_clip"] = True
        watched.found_inf = getattr(optimizer, "found_inf", None)
        watched.rates = _rates(optimizer)

    @fenced
    def step_ended(self, watched: Watched) -> None:
        """``optimizer.step()`` has changed the parameters."""
        self._close(watched, applied=True)

    def _close(self, watched: Watched, *, applied: bool) -> None:
        self.seal()
        now = time.monotonic()
        started, self._closed_before = self._closed_before, now
        step, self._next = self._next, self._next + 1
        losses, self._losses = list(self._losses), collections.deque(maxlen=MOST_PARTS)
        try:
            self._closed = self._closing(watched, step, started, now, losses, applied=applied)
        finally:  # whatever failed, the next step starts afresh
            watched.block, watched.scale, watched.clip, watched.found_inf = None, None, None, None
            watched.expected_backwards, watched.backwards = watched.backwards, 0
            self._ranges = {"input": [], "target": []}
            self._backward_seen = False
            self._activation_seconds = 0.0
            self._full_activations = self._cadence.full("activation", self._next)
        if self._trained_in[True] or self._trained_in[False]:
            self._trains_in_eval = not self._trained_in[True]
            self._trained_in = {True: False, False: False}
        self._enter_phase("train")

    def _closing(
        self, watched: Watched, step: int, started: float | None, now: float, losses: list[Number], *, applied: bool
    ) -> Pending:
        pending = Pending(
            step=step,
            optimizer=watched.index,
            plan=watched.plan,
            applied=applied,
            started=started,
            closed=now,
            timestamp=time.time(),
            losses=losses,
            rates=watched.rates,
            scaled=watched.scaled,
        )
        if watched.block is not None:
            pending.blocks["gradients"] = watched.block
            pending.gradients, pending.unknown = watched.positions, watched.unknown
        state_seconds = None
        with self.fence.guarding("hooks"):  # one by one: a step without its state is still a step
            self._close_numbers(watched, pending)
        with self.fence.guarding("hooks"):
            self.signals["activation"] = self._outputs.close(watched.plan.indexes, pending)
        with self.fence.guarding("hooks"):
            if self._cadence.full("state", pending.step) and watched.parameters:
                state_seconds = self._close_state(watched, pending)
        self._cadence.spent(
            None if started is None else now - started,
            state=state_seconds,
            activation_full=self._activation_seconds if self._full_activations else None,
            activation_sentinel=None if self._full_activations else self._activation_seconds,
        )
        closed_on(pending)
        return pending

    def _close_numbers(self, watched: Watched, pending: Pending) -> None:
        if watched.scale is not None:
            pending.numbers["loss_scale"] = watched.scale
        if watched.found_inf is not None:
            pending.numbers["found_inf"] = watched.found_inf.detach().clone().reshape(())
        if watched.clip is not None:
            pending.numbers["clip"] = watched.clip
            pending.reference = watched.positions.index(watched.reference)
        if pending.applied and watched.index in self._restarts:
            brought = self._restarts.pop(watched.index).brought(watched)
            if brought is not None:
                pending.numbers["state_before"] = brought
        for name, ranges in self._ranges.items():
            if ranges:
                pending.numbers[f"{name}_max_abs"], pending.numbers[f"{name}_nonfinite"] = stats.extremes(ranges)

    def _close_state(self, watched: Watched, pending: Pending) -> float:
        began = time.perf_counter()
        watched.close_state(pending)
        if pending.applied:
            self.signals["update_ratio"] = watched.close_updates(pending)
        return time.perf_counter() - began

    # -- observing and sealing --------------------------------------------------------------------

    def observe(self, loss: Number | None, inputs: Any, targets: Any) -> None:
        """Adds a loss and the ranges of a batch to the step being built, or to the one just closed."""
        with self._lock:
            quietly(self._observe, loss, inputs, targets)

    def _observe(self, loss: Number | None, inputs: Any, targets: Any) -> None:
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
            ranges = self._ranges[name]
            if len(ranges) >= MOST_PARTS:
                del ranges[0]
            ranges.append(stats.measure(tensors))

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


def _before(
    capture: weakref.ref[Capture], index: int, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]
) -> None:
    live = capture()
    if live is not None and live.alive:
        live.step_begins(live._watched[index], bool(kwargs.get("closure") or len(args) > 1))


def _after(
    capture: weakref.ref[Capture], index: int, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]
) -> None:
    live = capture()
    if live is not None and live.alive:
        live.step_ended(live._watched[index])


def _rates(optimizer: Optimizer) -> list[Number]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return [rate.detach().clone().reshape(()) if isinstance(rate, Tensor) else float(rate) for rate in rates]
