"""Capture: from the events of a training loop to one Pending a step.

Runs on the trainer thread. Every entry point is fenced: a fault of ours is counted and training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gradexporter import stats
from gradexporter.config import Config
from gradexporter.fence import Fence
from gradexporter.hooks import clipping, closing, points, scaler
from gradexporter.hooks.attachment import LayerHooks
from gradexporter.hooks.batch import valueless
from gradexporter.hooks.cadence import Cadence
from gradexporter.hooks.fallback import EagerParts
from gradexporter.hooks.gradients import Gradients
from gradexporter.hooks.guarded import fenced, quietly
from gradexporter.hooks.layers import find_layers, without_data_parallel
from gradexporter.hooks.mode import Mode
from gradexporter.hooks.observed import Observed
from gradexporter.hooks.optimizers import Together, announcers, rates_of
from gradexporter.hooks.outputs import Outputs
from gradexporter.hooks.reduction import WhenReduced
from gradexporter.hooks.restart import Restart
from gradexporter.hooks.saving import CleanState
from gradexporter.hooks.shares import find_sharding, optimized_by
from gradexporter.hooks.unannounced import Lookout, Sight
from gradexporter.hooks.watched import Watched, held_by
from gradexporter.readback import Number, Pending, pack
from gradexporter.records import Signature, Values

_log = logging.getLogger("gradexporter")


class Capture:
    """The hooks on one model and its optimizers; symmetric ``attach`` and ``detach``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        config: Config,
        fence: Fence,
        cadence: Cadence,
        submit: Callable[[Pending], None],
        phase: Callable[[str], None],
        scaling: GradScaler | None = None,
    ) -> None:
        """``optimizers`` come from ``optimizers.resolved``.

        ``submit`` takes a sealed step and ``phase`` a change of phase; both return at once.
        """
        self.fence = fence
        self.alive = False
        self.seconds = 0.0
        self.signals = {
            "gradient": True,
            "layer_gradient": True,
            "pre_clip": True,
            "activation": True,
            "update_ratio": True,
            "learning_rate": True,
            "loss": False,
        }
        self.monitor: object = None
        """Whoever must live as long as the hooks do."""
        self.model: nn.Module | None = model
        self._optimizers = list(optimizers)
        self._parameterless = config.activations == "all"
        self._kernels = config.kernels
        self.cadence = cadence
        self._submit = submit
        self.mode = Mode(phase)
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self.layer_hooks = LayerHooks()
        self._clean_state = CleanState()
        self._eager_parts = EagerParts()
        self._next = config.start_step
        self._closed: Pending | None = None
        self.ending: tuple[int, Any] | None = None
        """Optimizer whose compiled update is announced, and closed with the next event."""
        self._closed_before: float | None = None
        self.observed = Observed()
        self.sight = Sight()
        self.activation_seconds = 0.0
        self.full_activations = cadence.full("activation", self._next)
        goes_on = config.start_step > 1
        self.restarts = {index: Restart() for index in range(len(self._optimizers))} if goes_on else {}
        self._when_reduced = WhenReduced()
        self.gradients = Gradients(self.signals, scaling, self._when_reduced)
        self._modules: list[nn.Module | None] = []
        self.outputs = Outputs(0)
        self._survey(model)

    def _survey(self, model: nn.Module) -> None:
        """Finds layers and parameters as they are now."""
        parameters = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        sharding = find_sharding(model)
        self._when_reduced.surveyed(model, sharded=sharding is not None)
        self.norms = "share" if sharding is not None and sharding.partial else "global"
        self.layers = find_layers(model, parameters, sharding, parameterless=self._parameterless)
        held = {id(parameter) for parameter in parameters}
        free = (i for i, layer in enumerate(self.layers) if not any(id(p) in held for p in layer.parameters))
        leftovers = frozenset(free)  # frozen or parameterless layers go with the first optimizer
        self._watched = [
            Watched(index, optimizer, self.layers, leftovers if index == 0 else frozenset(), sharding)
            for index, optimizer in enumerate(self._optimizers)
        ]
        self._lookout = Lookout(self._watched, self.layers)
        modules = [layer.module for layer in self.layers]
        if modules != self._modules:
            self._modules = modules
            self.outputs = Outputs(len(modules))

    @property
    def last_step(self) -> int | None:
        """Number of the last closed step; None before the first."""
        return None if self._closed_before is None else self._next - 1

    @property
    def next_step(self) -> int:
        """Number of the step that is being built."""
        return self._next

    @property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each optimizer."""
        return tuple(watched.plan.layers for watched in self._watched)

    def signatures(self) -> tuple[Signature, ...]:
        """What must be the same, by optimizer, in a run that goes on with the baselines of this one."""
        return tuple(watched.signature() for watched in self._watched)

    def resume(self, step: int) -> None:
        """The next step is number ``step`` of a run that goes on."""
        self._next = step
        self.restarts = {index: Restart() for index in range(len(self._optimizers))}
        self.full_activations = self.cadence.full("activation", step)

    # -- attaching ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Sets every hook; raises what torch raises, with nothing left behind."""
        assert self.model is not None
        try:
            place = self.layer_hooks.attach(self, self.model, self._watched)
            entrance = without_data_parallel(self.model)
            self._hold(entrance.register_forward_pre_hook(points.Entering(self, place), with_kwargs=True))
            self._hold(entrance.register_forward_hook(points.Leaving(self), always_call=True))
            for index, optimizer in enumerate(self._optimizers):
                for one in announcers(optimizer):
                    self._hold(one.register_step_pre_hook(points.Updating(self, index, one)))
                    self._hold(one.register_step_post_hook(points.Updated(self, index, one)))
            scaler.listen(self)
            clipping.listen(self)
            stats.kernels.process.ask(self, self._kernels, self.fence.record)
            self._clean_state.attach(self.model.modules())
            self._eager_parts.attach()
        except BaseException:
            self.detach()
            raise
        self.alive = True

    def watches(self, model: nn.Module) -> bool:
        """Whether this is the capture of ``model``."""
        return self.model is model

    def detach(self) -> None:
        """Removes every hook; a second call does nothing."""
        self.alive = False
        scaler.unlisten(self)
        clipping.unlisten(self)
        stats.kernels.process.unask(self)
        self._clean_state.detach()
        self._eager_parts.detach()
        self.layer_hooks.detach()
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """Lets go of model and optimizers, so that a closed monitor keeps no parameter alive."""
        self.model = None
        self._optimizers, self._watched, self._closed = [], [], None
        self.layers, self._modules, self.outputs = [], [], Outputs(0)
        self._lookout = Lookout([], [])

    def _hold(self, handle: Any) -> None:
        self._handles.append(handle)

    def merge(self) -> None:
        """From now on the steps of all optimizers are parts of one update; a second call does nothing."""
        if isinstance(self._optimizers[0], Together):
            return
        self._optimizers = [Together(self._optimizers)]
        self._survey_again()

    def _survey_again(self) -> None:
        """A parameter joined or left a group: the layers are found anew."""
        assert self.model is not None
        self._survey(self.model)
        self.layer_hooks.attach(self, self.model, self._watched)

    # -- forward --------------------------------------------------------------------------------

    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The watched model is about to run."""
        if module.training and torch.is_grad_enabled() and self.sight.lost(self._replaced):
            self.signals["gradient"] = False
        self._enter(module, args, kwargs)

    def _replaced(self) -> bool:
        held = {identity for watched in self._watched for identity in watched.held}
        return self.model is not None and bool(held) and held.isdisjoint(optimized_by(self.model))

    @fenced
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._eager_parts.look()
        if self._lookout:
            self._look()
            if self._lookout.rearranged():
                self._survey_again()
        if self.ending is not None:
            self._end_compiled()
        self.layer_hooks.shelter(module.training)
        self._when_reduced.entering()
        if self.mode.entering(module):
            if not self.observed.sources["input"]:
                self.observed.measure_range("input", (args, kwargs))
            self.seal()  # last: from here on the worker wants the interpreter too

    def begin_forward(self) -> None:
        """A training forward begins in compiled code."""
        if self.sight.lost(self._replaced):
            self.signals["gradient"] = False
        if self._lookout:
            self._look()
        self._when_reduced.entering()
        self.seal()

    @fenced
    def leaving(self) -> None:
        """The watched model has run, or raised."""
        if self.mode.in_training_forward and self._lookout:
            if self._lookout.due:  # a forward with its own backward and update
                self._look()
            self._lookout.forward_ended()
        self.mode.in_training_forward = False
        self.layer_hooks.shelter(True)

    def layer_output(self, layer: int, output: Any) -> None:
        """One layer has returned ``output``."""
        if self.outputs.passed_over(layer) or not self.alive or valueless():
            return
        if torch._C._current_graph_task_id() != -1:
            # Inside a backward a checkpointed forward is computed again: measured then if it was not before.
            if self.outputs.seen(layer) or not torch.is_grad_enabled():
                return
        elif not (self.mode.in_training_forward or self.mode.measures(self.model)):
            return
        began = time.perf_counter()
        try:
            if torch._C._len_torch_dispatch_stack():
                quietly(self.measure_output, layer, output)
            else:
                self.measure_output(layer, output)
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            spent = time.perf_counter() - began
            self.seconds += spent
            self.activation_seconds += spent

    def measure_output(self, layer: int, output: Any) -> None:
        if self._lookout.due and torch._C._current_graph_task_id() == -1:
            self._look()
        if self._closed is not None or self.ending is not None:
            self.seal()
        self.outputs.add(layer, output, full=self.full_activations)

    # -- backward -------------------------------------------------------------------------------

    @fenced
    def backward_began(self, watched: Watched, parameter: Tensor) -> None:
        """The first gradient of a backward was accumulated."""
        if self._lookout.begins_anew(watched, parameter):
            self._look()
            if watched.changes is not None:
                watched.changes.remember()
        self.seal()
        self.observed.backward_seen = True
        self.sight.backward()

    @fenced
    def gradient_ready(self, watched: Watched, parameter: Tensor) -> None:
        """The gradient of one parameter is complete, and will be gone when the backward is."""
        watched.measure_one_by_one([parameter])

    @fenced
    def backward_ended(self, watched: Watched) -> None:
        """A backward that touched this optimizer's parameters is complete, reductions over ranks included.

        Of as many backwards as the last update had (accumulation, reentrant checkpoints) only the last is worth a
        pass; an update that comes sooner than that measures for itself, after clipping if there is any.
        """
        watched.count_backward()
        if watched.is_left_behind and watched.announced:
            self.signals["gradient"] = False
            _log.warning(
                "gradexporter: %d backwards without a step of the optimizer given to watch(), and the parameters "
                "change: another one has taken its place; close() this monitor and call watch() with the new one",
                watched.backwards,
            )
        if watched.announced:
            self.gradients.backward_ended(watched)
        else:
            watched.rates = rates_of(watched.optimizer)
            self.gradients.backward_ended_by_hand(watched)
            self._lookout.backward_ended(watched)
            if self._when_reduced.follows_backward():
                watched.block, watched.parts = None, {}  # and nothing tells when they are reduced

    @fenced
    def clip_begins(self, parameters: Sequence[Tensor], norms: Values | None) -> None:
        """A clip of ours is about to scale the gradients of ``parameters``; see ``ClipListener``."""
        clipped = list(map(id, parameters))
        for watched in self._watched:
            self.gradients.clip_begins(watched, clipped, norms, full=self._thorough)

    # -- update ---------------------------------------------------------------------------------

    @fenced
    def look(self) -> None:
        """Closes the updates that no optimizer announced, if there were any."""
        self._look()

    def _look(self) -> None:
        for watched in self._lookout.updated():
            self.signals["pre_clip"] = watched.block is not None
            self._close(watched, applied=True)

    def _updated_by(self, optimizer: Any) -> Watched | None:
        return next((watched for watched in self._watched if watched.is_updated_by(optimizer)), None)

    @fenced
    def scaler_unscales(self, scaling: GradScaler, optimizer: Any) -> None:
        """A scaler is about to divide the gradients of ``optimizer`` by its scale."""
        watched = self._updated_by(optimizer)
        if watched is not None:
            self.gradients.unscaling(watched, scaling, optimizer)

    @fenced
    def scaler_steps(self, scaling: GradScaler, optimizer: Any) -> None:
        """A scaler is about to unscale, check and perhaps apply the update of ``optimizer``."""
        watched = self._updated_by(optimizer)
        if watched is not None:
            watched.stepping = False
            self.gradients.scaler_steps(watched, scaling, optimizer)

    @fenced
    def scaler_stepped(self, scaling: GradScaler, optimizer: Any) -> None:
        """The scaler is done; when the optimizer's hooks did not fire, it skipped the update."""
        watched = self._updated_by(optimizer)
        if watched is not None and not watched.stepping:
            watched.rates = rates_of(optimizer)
            self._close(watched, applied=watched.changes is not None and watched.changes.moved())

    @fenced
    def step_begins(self, index: int, optimizer: Any, closure: bool) -> None:
        """``optimizer.step()`` is about to change the parameters."""
        if torch._C._current_graph_task_id() != -1:
            self._step_within_backward(index, optimizer)
            return
        watched = self._watched[min(index, len(self._watched) - 1)]
        if not watched.announced:
            watched.stepped = True
            return
        if not watched.steps.begin(optimizer):
            return
        self.seal()
        if held_by(watched.optimizer) != watched.held:
            scale = watched.scale
            self._survey_again()
            watched = self._watched[index]
            watched.scale = scale
            watched.steps.begin(optimizer)
        elif watched.unhooked and any(parameter.requires_grad for parameter in watched.unhooked):
            self.layer_hooks.attach_trained(watched)
        watched.stepping, watched.closure = True, closure
        if watched.index in self.restarts:
            with self.fence.guarding("hooks"):
                self.restarts[watched.index].update_begins(watched)
        if not closure:  # its backward is still to come
            still_scaled = getattr(optimizer, "grad_scale", None) is not None
            self.gradients.update_begins(watched, still_scaled=still_scaled, thorough=self._thorough)
            if watched.block is not None:
                self.sight.backward()
        watched.found_inf = getattr(optimizer, "found_inf", None)
        watched.rates = rates_of(watched.optimizer)

    @property
    def _thorough(self) -> bool:
        """Whether the step that is being built is measured in full."""
        return self.cadence.full("state", self._next)

    def _step_within_backward(self, index: int, optimizer: Any) -> None:
        """An update in the hooks of its gradients: all steps within one backward are one update."""
        if not isinstance(self._optimizers[0], Together):
            self.merge()
            hook = self._watched[0].accumulated
            if hook is not None:
                hook.began(optimizer.param_groups[0]["params"][0])
        watched = self._watched[0]
        watched.stepped = True
        watched.measure_one_by_one([p for group in optimizer.param_groups for p in group["params"]])

    def _end_compiled(self) -> None:
        ending, self.ending = self.ending, None
        if ending is not None:
            self.step_ended(*ending)

    @fenced
    def step_ended(self, index: int, optimizer: Any) -> None:
        """``optimizer.step()`` has changed the parameters."""
        watched = self._watched[min(index, len(self._watched) - 1)]
        if watched.announced and watched.steps.end(optimizer):
            if watched.closure:
                self.gradients.closure_ended(watched, thorough=self._thorough)
            self._close(watched, applied=True)

    def _close(self, watched: Watched, *, applied: bool) -> None:
        self.seal()
        now = time.monotonic()
        started, self._closed_before = self._closed_before, now
        step, self._next = self._next, self._next + 1
        losses = self.observed.take_losses()
        try:
            self._closed = closing.close(self, watched, step, started, now, losses, applied=applied)
        finally:  # whatever failed, the next step starts afresh
            watched.forget_step()
            self.observed.start_afresh()
            self.activation_seconds = self.gradients.seconds = 0.0
            self.full_activations = self.cadence.full("activation", self._next)
        self.mode.updated()

    # -- observing and sealing --------------------------------------------------------------------

    def observe(self, loss: Number | None, inputs: Any, targets: Any) -> None:
        """Adds a loss and the ranges of a batch to the step being built, or to the one just closed."""
        if self._lookout:
            self.look()
        with self._lock:
            quietly(self._observe, loss, inputs, targets)

    def _observe(self, loss: Number | None, inputs: Any, targets: Any) -> None:
        if self.ending is not None:
            self._end_compiled()
        if loss is not None:
            # Where the forward is not seen (compiled before us), a loop that observes before its backward
            # must not give this loss to the step before.
            if self._closed is not None and self.observed.loss_comes_first:
                self.seal()
                self.observed.losses.append(loss)
            elif self._closed is not None:
                self._closed.losses.append(loss)
            else:
                self.observed.add_loss(loss)
            self.signals["loss"] = True
        for name, batch in (("input", inputs), ("target", targets)):
            if batch is not None:
                self.observed.sources[name] = True
                self.observed.measure_range(name, batch)

    def seal(self, older_than: float = 0.0) -> None:
        """Hands the closed step over, if there is one and it closed ``older_than`` seconds ago."""
        if self.ending is not None and not older_than:
            self._end_compiled()
        if self._closed is None:
            return
        with self._lock:
            closed = self._closed
            if closed is None or time.monotonic() - closed.closed < older_than:
                return
            self._closed = None
            pack(closed)
            self._submit(closed)
