"""What is measured against the bare step: ours in several profiles, and what people use instead."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from models import Subject
from torch import Tensor, nn

import gradexporter
from gradexporter.stats import kernels


def _clock_seconds() -> float:
    readings = [time.thread_time() for _ in range(1001)]
    return statistics.median(after - before for before, after in itertools.pairwise(readings))


CLOCK_SECONDS = _clock_seconds()
"""What it takes to look at the clock, which is in every difference of two readings."""


class Unavailable(Exception):
    """This machine lacks what a contestant needs."""


class Contestant:
    """Added to the bare step in every second block; as it stands it adds nothing, which is the noise floor."""

    steps_multiple = 1
    """A block has a multiple of so many steps, so that what is done every so often is in each."""
    complete = True
    """Whether ``seconds`` is all of its cost; hooks of autograd's own are not in it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.seconds = 0.0
        """CPU time of its own so far, on all its threads."""

    def attach(self) -> None:
        """Before a block with it."""

    def after_forward(self, loss: Tensor) -> None:
        """The loss is there."""

    def after_backward(self) -> None:
        """The gradients are there, the optimizer has not run."""

    def settle(self) -> None:
        """What the block began is done, on whatever thread."""

    def detach(self) -> None:
        """After a block; the bare step is bare again."""

    def close(self) -> None:
        """The last block is over."""

    def _timed(self, function: Callable[..., None], *args: Any) -> None:
        began = time.thread_time()
        function(*args)
        self.seconds += time.thread_time() - began - CLOCK_SECONDS

    def step(self) -> None:
        """One training step."""
        self.subject.optimizer.zero_grad(set_to_none=True)
        loss = self.subject.forward()
        self._timed(self.after_forward, loss)
        loss.backward()
        self._timed(self.after_backward)
        self.subject.optimizer.step()


class Clip(Contestant):
    """torch's clip, which takes one norm of every gradient and never clips here."""

    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.subject.model.parameters(), 1e9, foreach=True)


class HandWritten(Contestant):
    """The loop that one writes first: three numbers a gradient, each fetched at once."""

    def after_backward(self) -> None:
        for parameter in self.subject.model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradient.norm().item()
            gradient.abs().max().item()
            torch.isfinite(gradient).all().item()


class Anomaly(Contestant):
    """torch's anomaly mode."""

    complete = False

    def attach(self) -> None:
        torch.autograd.set_detect_anomaly(True)

    def detach(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class Wandb(Contestant):
    """``wandb.watch`` at every step, offline."""

    complete = False

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        import wandb

        self._wandb = wandb
        self._run = wandb.init(mode="offline", settings=wandb.Settings(silent=True))

    def attach(self) -> None:
        self._wandb.watch(self.subject.model, log="all", log_freq=1)

    def after_backward(self) -> None:
        self._run.log({})

    def detach(self) -> None:
        self._wandb.unwatch(self.subject.model)

    def close(self) -> None:
        self._run.finish(quiet=True)


# -- ours -------------------------------------------------------------------------------------------


class Ours(Contestant):
    """gradexporter; ``seconds`` is that of its hooks, of its worker thread and of its endpoint's."""

    layers = True
    """Whether outputs of layers are looked at."""

    def __init__(self, subject: Subject, **settings: Any) -> None:
        super().__init__(subject)
        self.monitor = gradexporter.watch(subject.model, subject.optimizer, **{"serve": False, **settings})
        parts = self.monitor._parts
        assert parts is not None
        self.capture = parts.capture
        wanted = settings.get("kernels", "auto")
        if wanted != "stock":
            kernels.process.wait(300.0)
        if wanted == "native" and kernels.process.in_use()["cpu"] != "native":
            self.monitor.close()
            raise Unavailable("no native kernels on this machine")
        if not self.layers:
            self.capture.detach()
            self.capture.layers = [dataclasses.replace(layer, module=None) for layer in self.capture.layers]
            self.capture.attach()
        self.step()
        self.settle()
        self.capture.detach()
        self.seconds = 0.0

    def attach(self) -> None:
        self.capture.attach()
        self._capture_before, self._threads_before = self.capture.seconds, _thread_seconds()

    def after_forward(self, loss: Tensor) -> None:
        self.monitor.observe(loss)

    def settle(self) -> None:
        assert self.monitor.flush()

    def detach(self) -> None:
        self.capture.detach()
        self.seconds += self.capture.seconds - self._capture_before + _thread_seconds() - self._threads_before

    def close(self) -> None:
        snapshot = self.monitor.snapshot
        assert snapshot is not None
        assert not any(snapshot.itself.failures.values()), snapshot.itself.failures
        self.monitor.close()


class Disabled(Contestant):
    """``GRADEXPORTER_DISABLED``: the line of the loop stays, and does nothing."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.monitor = gradexporter.watch(subject.model, subject.optimizer, disabled=True)

    def after_forward(self, loss: Tensor) -> None:
        self.monitor.observe(loss)


class Gradients(Ours):
    """Norm, maximum and non-finite count of every gradient at every step, and nothing else."""

    layers = False

    def __init__(self, subject: Subject, **settings: Any) -> None:
        super().__init__(subject, state_every=10**9, activation_every=10**9, **settings)


class OwnClip(Gradients):
    """Our clip in place of torch's, which tells the monitor the norm of every gradient; ``seconds`` is the call's."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject, kernels="stock")

    def after_forward(self, loss: Tensor) -> None:
        """Nothing: its time is not the clip's."""

    def after_backward(self) -> None:
        gradexporter.clip_grad_norm_(self.subject.model.parameters(), 1e9, foreach=True)

    def detach(self) -> None:
        self.capture.detach()


class Default(Ours):
    """Gradients and the non-finite sentinel of every output at every step, all else at every tenth."""

    steps_multiple = 10

    def __init__(self, subject: Subject, **settings: Any) -> None:
        super().__init__(subject, state_every=10, activation_every=10, **settings)


class Scraped(Default):
    """The default profile while another process scrapes it once a second."""

    def __init__(self, subject: Subject, **settings: Any) -> None:
        super().__init__(subject, serve=True, port=0, host="127.0.0.1", **settings)
        self._scraper = scraper(f"http://127.0.0.1:{self.monitor.port}/metrics", 1.0)

    def close(self) -> None:
        self._scraper.kill()
        self._scraper.wait()
        super().close()


class Everything(Ours):
    """All there is, at every step: an armed run."""

    def __init__(self, subject: Subject, **settings: Any) -> None:
        super().__init__(subject, state_every=1, activation_every=1, **settings)


def scraper(url: str, every: float, times: int = 10**9) -> subprocess.Popen[bytes]:
    """A process that asks for a page every so many seconds, compressed."""
    code = (
        "import sys, time, urllib.request as r\n"
        "ask = r.Request(sys.argv[1], headers={'Accept-Encoding': 'gzip'})\n"
        "for _ in range(int(sys.argv[3])):\n"
        "    began = time.monotonic()\n"
        "    r.build_opener(r.ProxyHandler({})).open(ask, timeout=30).read()\n"
        "    time.sleep(max(0.0, began + float(sys.argv[2]) - time.monotonic()))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, url, str(every), str(times)], stderr=subprocess.DEVNULL)


def _thread_seconds() -> float:
    """CPU time so far of every thread of ours."""
    return sum(thread_seconds(thread) for thread in threading.enumerate() if thread.name.startswith("gradexporter"))


def thread_seconds(thread: threading.Thread) -> float:
    """CPU time of a thread so far."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@contextmanager
def cpu_clock() -> Iterator[None]:
    """Hooks measure themselves by wall clock; here by CPU time of their thread, which a busy machine leaves alone."""
    clock = types.SimpleNamespace(**{**vars(time), "perf_counter": time.thread_time})
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("gradexporter.hooks") and getattr(module, "time", None) is time
    ]
    for module in modules:
        module.time = clock  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.time = time  # type: ignore[attr-defined]


KERNELS = ("stock", "native")

PROFILES: dict[str, type[Ours]] = {
    "gradients": Gradients,
    "default": Default,
    "default, scraped": Scraped,
    "everything": Everything,
}

OTHERS: dict[str, type[Contestant]] = {
    "nothing": Contestant,
    "clip_grad_norm_": Clip,
    "hand-written loop": HandWritten,
    "anomaly mode": Anomaly,
    "disabled": Disabled,
}


def contestants() -> dict[str, Callable[[Subject], Contestant]]:
    """By name, the noise floor and torch's clip first: the others are held against them."""
    found: dict[str, Callable[[Subject], Contestant]] = dict(OTHERS)
    if importlib.util.find_spec("wandb"):
        found["wandb.watch"] = Wandb
    found["own clip"] = OwnClip
    for choice in KERNELS:
        for name, profile in PROFILES.items():
            if profile is not Scraped or choice == "stock":
                found[f"{name} ({choice})"] = lambda subject, p=profile, k=choice: p(subject, kernels=k)
    return found
