"""``watch`` and ``Monitor``: the one place where capture, judgement and sinks are put together."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gradexporter import identity
from gradexporter.config import DEFAULT_PORT, Config, resolve
from gradexporter.fence import Fence
from gradexporter.hooks import Capture
from gradexporter.hooks.batch import valueless
from gradexporter.hooks.cadence import Cadence
from gradexporter.hooks.given import Stepping, checked
from gradexporter.hooks.optimizers import resolved
from gradexporter.hooks.partitions import absent
from gradexporter.judge import Judge
from gradexporter.ranks import Reduction, agreed
from gradexporter.records import Finding, Snapshot, State, StepReport
from gradexporter.resume import Past, ResumeError, together
from gradexporter.sinks.prometheus import Endpoint, EndpointError
from gradexporter.stats import kernels
from gradexporter.worker import Worker

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the last steps; at interpreter exit nothing may hang."""

FLUSH_SECONDS = 30.0

MOST_HOLD_SECONDS = 30.0
"""Longest that a run which ended unhealthy waits for its last scrape."""

PHASES = ("train", "eval", "checkpoint")

Loss = TypeVar("Loss")


_log = logging.getLogger("gradexporter")
_open: weakref.WeakSet[Monitor] = weakref.WeakSet()


def watch(
    model: nn.Module,
    optimizer: Stepping | Sequence[Stepping] | None = None,
    scaler: GradScaler | None = None,
    **settings: Any,
) -> Monitor:
    """Measures, judges and publishes every step of a training loop from now on.

    ``optimizer`` is one or a sequence. Without one, or with an object that is no optimizer of torch, an update is seen
    by the parameters that it changed, at the next forward, backward, ``observe`` or ``flush``.

    ``settings`` are the fields of ``Config``; an explicit one wins over ``GRADEXPORTER_*`` and over the default.
    Call it after the model is on its device and before the first step. Raises ConfigError when something given
    cannot be used; after it has returned nothing of ours raises into training.
    """
    config = resolve(settings)
    optimizers = checked(model, optimizer, scaler)
    if config.disabled:
        return Monitor()
    if any(monitor._parts is not None and monitor._parts.capture.watches(model) for monitor in list(_open)):
        _log.warning("gradexporter: this model is watched already, and measured twice from now on; close() the first")
    fence = Fence()
    cadence = Cadence(config)
    own = identity.identify(config, type(model).__name__, ", ".join(type(one).__name__ for one in optimizers) or "none")
    watched = resolved(model, optimizers)
    joined = identity.in_group(own, config)
    worker = Worker(joined, config, fence, cadence, len(watched))
    if joined is own:
        worker.in_group = lambda alone: identity.in_group(alone, config)
    capture = Capture(
        model, watched, config, fence, cadence, worker.submit, lambda phase: worker.tell("phase", phase), scaler
    )
    if config.all_reduce:
        worker.reduction = _reduction(capture)
    for one in watched:
        reason = absent(one)
        if reason is not None:
            _log.warning("gradexporter: %s", reason)
    endpoint = _endpoint(config, worker, fence) if config.serve else None
    return Monitor(_Parts(config, fence, cadence, worker, capture, endpoint))


def _reduction(capture: Capture) -> Reduction | None:
    reduction = agreed(capture.layer_names) if capture.norms == "share" else None
    if reduction is None:
        _log.warning("gradexporter: all_reduce has no effect: no parameter of this model is spread over ranks")
    return reduction


def _endpoint(config: Config, worker: Worker, fence: Fence) -> Endpoint | None:
    local = identity.local_rank()
    endpoint = Endpoint(
        lambda: worker.snapshot,
        host=config.host,
        port=DEFAULT_PORT + local if config.port is None else config.port,
        first_alternate=DEFAULT_PORT + max(identity.local_world_size(), local + 1),
        max_series=config.max_series,
        on_failure=fence.record,
    )
    try:
        endpoint.start()
    except EndpointError as error:  # a port is never worth a run
        fence.record("endpoint", str(error))
        return None
    except Exception as error:
        fence.record("endpoint", error)
        return None
    return endpoint


class _Parts:
    """What an active Monitor is made of."""

    def __init__(
        self,
        config: Config,
        fence: Fence,
        cadence: Cadence,
        worker: Worker,
        capture: Capture,
        endpoint: Endpoint | None,
    ) -> None:
        self.config = config
        self.fence = fence
        self.cadence = cadence
        self.worker = worker
        self.capture = capture
        self.endpoint = endpoint
        reference = weakref.ref(capture)  # the worker must not keep the model alive

        def facts() -> dict[str, Any]:
            live, reduction = reference(), worker.reduction
            signals = dict(live.signals) if live else {}
            if reduction is not None:
                signals["all_reduce"] = reduction.alive
            return {
                "overhead_seconds": live.seconds if live else 0.0,
                "overhead_budget_exceeded": cadence.exceeded,
                "capture_every_steps": cadence.every,
                "watched_layers": len(live.layers) if live else 0,
                "norms": live.norms if live and not (reduction and reduction.alive) else "global",
                "layer_shares": config.layer_shares,
                "signal_available": signals,
                "kernels": kernels.process.in_use(),
            }

        def idle() -> None:
            live = reference()
            if live is not None:
                live.seal(older_than=1.0)

        worker.facts = facts
        worker.idle = idle


class Monitor:
    """One watched run; made by ``watch``. Also a context manager, and closed at interpreter exit.

    Every method may be called on an inert or closed monitor and then does nothing. None of them raises into
    training.
    """

    def __init__(self, parts: _Parts | None = None) -> None:
        """Inert without ``parts``."""
        self._parts = parts
        self._closed = parts is None
        self._final: dict[str, Any] = {}
        self._closing = threading.Lock()
        if parts is None:
            return
        try:
            parts.capture.attach()
            parts.worker.start()
        except BaseException:
            parts.capture.detach()
            if parts.endpoint is not None:
                parts.endpoint.close()
            raise
        parts.capture.monitor = self  # a monitor that nobody kept lives as long as the hooks
        self._finalizer = weakref.finalize(self, _release, parts.worker, parts.endpoint)
        self._finalizer.atexit = False
        _open.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return Monitor()  # a copy of a trainer that holds us watches nothing

    def __reduce__(self) -> tuple[type[Monitor], tuple[()]]:
        return Monitor, ()

    # -- the training loop ----------------------------------------------------------------------

    def observe(self, loss: Loss, inputs: Any = None, targets: Any = None) -> Loss:
        """Returns ``loss`` unchanged and adds it to the step being built, without synchronising.

        ``loss`` is a tensor of one element or a float; several a step are averaged. After ``optimizer.step()``
        it belongs to the step just closed. ``inputs`` and ``targets`` are tensors, nested as they come: their
        range is measured.
        """
        if not self._closed and self._parts is not None and not torch.compiler.is_compiling():
            parts = self._parts
            try:
                number = self._number(loss)
                parts.capture.observe(number, inputs, targets)
            except Exception as error:
                parts.fence.record("observe", error)
        return loss

    def _number(self, loss: Any) -> float | Tensor | None:
        if isinstance(loss, Tensor):
            if valueless():
                return None
            if not loss.is_complex() and not loss.is_meta and not loss.is_nested and loss.numel() == 1:
                # A copy: the user's tensor is not kept, and changing it in place changes nothing here.
                return loss.detach().to(torch.float64, copy=True).reshape(())
        elif isinstance(loss, (int, float)) and not isinstance(loss, bool):
            return float(loss)
        elif loss is None:
            return None
        assert self._parts is not None
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        self._parts.fence.record(
            "observe",
            f"a loss must be a tensor of one element or a float, got {type(loss).__name__}{shape}; it is ignored",
        )
        return None

    def checkpoint_saved(self, path: str | os.PathLike[str] | None = None, step: int | None = None) -> None:
        """Notes that a checkpoint of ``step`` (None: the last closed one) was written to ``path``."""
        if self._closed or self._parts is None:
            return
        with self._parts.fence.guarding("observe"):
            if step is None:
                step = self._parts.capture.last_step
            if step is not None:
                self._parts.worker.tell("checkpoint", int(step))

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs to be judged without a warm-up, to be saved in the checkpoint beside the model.

        Plain Python: baselines, the number of the last step, checkpoints. Waits until every closed step is judged.
        Empty when inert, or when that takes longer than ``FLUSH_SECONDS``, which is counted.
        """
        if self._parts is None or self._closed:
            return self._final
        with self._parts.fence.guarding("resume"):
            self._parts.capture.look()
            self._parts.capture.seal()
            return self._state(self._parts)
        return {}

    def _state(self, parts: _Parts) -> dict[str, Any]:
        signatures, step, rhythm = parts.capture.signatures(), parts.capture.next_step - 1, parts.cadence.state_dict()

        def state(judges: tuple[Judge, ...], checkpoints: tuple[int, ...]) -> dict[str, Any]:
            past = Past(step=step, timestamp=time.time(), judges=judges, checkpoints=checkpoints, **rhythm)
            return past.state_dict(signatures)

        answer = parts.worker.ask(state, FLUSH_SECONDS)
        if answer is None:
            parts.fence.record("resume", f"steps were not judged within {FLUSH_SECONDS:.0f} s: no state is saved")
        return answer or {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> bool:
        """Continues the run that ``state_dict`` was called on, its count of steps included; best before the first step.

        False for a state that cannot be continued from: None, one of another version, of another model or of other
        optimizers. It is logged why, and the run warms up as a new one does. A ``start_step`` above 1 that
        ``watch`` was given wins over the saved count.
        """
        if self._parts is None or self._closed:
            return False
        parts = self._parts
        with parts.fence.guarding("resume"):
            parts.capture.look()
            if together(state):
                parts.capture.merge()
            try:
                past = Past.from_state_dict(state, parts.capture.signatures(), parts.config.judge)
            except ResumeError as error:
                _log.warning("gradexporter: nothing is continued, baselines are learned anew: %s", error)
                if state:  # nothing saved is no fault
                    parts.fence.count("resume")
                return False
            parts.capture.seal()
            started = parts.capture.last_step is not None
            step = past.step + 1 if started or parts.config.start_step == 1 else parts.config.start_step
            parts.worker.resume(past)
            parts.cadence.resume(past.first, past.armed_until, step)
            parts.capture.resume(step)
            _log.info("gradexporter: continues at step %d with saved baselines", step)
            return True
        return False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a block as ``eval`` or ``checkpoint``, so that a pause of training is not a stall.

        Another name is logged and counted, and the block runs all the same.
        """
        if name in PHASES:
            self._tell_phase(name)
        elif not self._closed and self._parts is not None:
            self._parts.fence.record("observe", f"phase cannot be {name!r}: give one of {', '.join(PHASES)}")
        try:
            yield
        finally:
            self._tell_phase("train")

    def _tell_phase(self, name: str) -> None:
        if not self._closed and self._parts is not None:
            self._parts.worker.tell("phase", name)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def report(self) -> StepReport | None:
        """The latest judged step; None before the first."""
        return None if self._parts is None else self._parts.worker.report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The most recent findings, oldest first; at most a thousand."""
        return () if self._parts is None else tuple(self._parts.worker.findings)

    @property
    def snapshot(self) -> Snapshot | None:
        """Everything that is published at this moment; None when inert."""
        return None if self._parts is None else self._parts.worker.snapshot

    @property
    def port(self) -> int | None:
        """TCP port of the endpoint; None when it does not serve."""
        return None if self._parts is None or self._parts.endpoint is None else self._parts.endpoint.port

    @property
    def url(self) -> str | None:
        """Address of the endpoint's landing page; None when it does not serve."""
        return None if self._parts is None or self._parts.endpoint is None else self._parts.endpoint.url

    # -- ending -------------------------------------------------------------------------------------

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits until every closed step is judged and published; False if that takes longer than ``timeout`` s."""
        if self._parts is None or self._closed:
            return True
        with self._parts.fence.guarding("close"):
            self._parts.capture.look()
            self._parts.capture.seal()
            return self._parts.worker.drain(timeout)
        return False

    def close(self, hold: float | None = None) -> None:
        """Ends the watch: hooks off, last steps published, port closed. A second call does nothing.

        ``hold`` keeps the final state on the endpoint for so many seconds before the port closes, for a last
        scrape; None takes ``hold_seconds``.
        """
        self._end("closed", hold)

    def _end(self, reason: str, hold: float | None = None) -> None:
        with self._closing:
            if self._closed or self._parts is None:
                return
            self._closed = True
        parts = self._parts
        _open.discard(self)
        self._finalizer.detach()
        with parts.fence.guarding("close"):
            parts.capture.look()
            parts.capture.seal()
        with parts.fence.guarding("close"):
            parts.capture.detach()
        with parts.fence.guarding("close"):
            parts.worker.tell("end", reason)
            parts.worker.stop(CLOSE_SECONDS)
            if parts.worker.is_done:
                self._final = self._state(parts)  # for a loop that saves after it has closed us
        with parts.fence.guarding("close"):
            if parts.endpoint is not None:
                try:
                    threading.Event().wait(_hold_seconds(parts, parts.endpoint, hold))
                finally:  # Ctrl-C ends the hold, and the port with it
                    parts.endpoint.close()
        parts.capture.monitor = None
        parts.capture.forget()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "closed" if kind is None else "signal" if issubclass(kind, KeyboardInterrupt) else "exception"
        self._end(reason)


def _hold_seconds(parts: _Parts, endpoint: Endpoint, asked: float | None) -> float:
    """How long the final state is worth showing: the run's last scrape must not be one from mid-incident."""
    seconds = parts.config.hold_seconds if asked is None else asked
    if seconds is not None:
        return seconds
    state, gap = parts.worker.snapshot.state, endpoint.scrape_gap
    if gap is None or state in (None, State.WARMING_UP, State.HEALTHY):
        return 0.0
    return min(2 * gap, MOST_HOLD_SECONDS)


def _release(worker: Worker, endpoint: Endpoint | None) -> None:
    worker.stop(0.0)
    if endpoint is not None:
        endpoint.close()


def _at_exit() -> None:
    uncaught = getattr(sys, "last_type", None)
    reason = "closed" if uncaught is None else "signal" if uncaught is KeyboardInterrupt else "exception"
    for monitor in list(_open):
        monitor._end(reason)


def _in_forked_child() -> None:
    """A child shares the hooks but has neither thread nor endpoint: it goes on unwatched."""
    for monitor in list(_open):
        parts = monitor._parts
        monitor._closed = True
        monitor._finalizer.detach()
        if parts is not None:
            parts.capture.alive = False
    _open.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
