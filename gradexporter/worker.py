"""The worker thread: sealed steps in, judged and published snapshots out.

It holds neither model nor optimizer, so that it keeps no user tensor alive.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gradexporter.config import Config
from gradexporter.fence import Fence
from gradexporter.hooks.cadence import Cadence
from gradexporter.judge import Judge
from gradexporter.ranks import Reduction
from gradexporter.readback import Pending, Reader
from gradexporter.records import Finding, FindingKind, Identity, SelfStats, Severity, Snapshot, State, StepReport
from gradexporter.resume import Past
from gradexporter.tally import Tally

MOST_PENDING = 1024
"""Sealed steps that may wait; beyond it the oldest is dropped and counted."""

MOST_FINDINGS = 1000
"""Findings that ``Monitor.findings`` keeps."""

SAY_AGAIN_STEPS = 16
"""A critical finding is logged when there was none of its kind for so many steps."""

Answer = TypeVar("Answer")

_log = logging.getLogger("gradexporter")


class Worker:
    """Reads back, judges, tallies and publishes, in order, on one daemon thread."""

    def __init__(self, identity: Identity, config: Config, fence: Fence, cadence: Cadence, optimizers: int) -> None:
        self._fence = fence
        self._cadence = cadence
        self._judges = [Judge(config.judge) for _ in range(optimizers)]
        self._reader = Reader()
        self._tally = Tally(identity, time.time, config.aligned_every)
        # A queue in C: an interrupt of the trainer thread, or a fork, never finds its lock half taken.
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._dropped = 0
        self._seconds = 0.0
        self._said: dict[FindingKind, int] = {}
        self.findings: collections.deque[Finding] = collections.deque(maxlen=MOST_FINDINGS)
        self.report: StepReport | None = None
        self.snapshot: Snapshot = self._tally.snapshot
        """What sinks read: one reference, swapped when a step is complete."""
        self.facts: Callable[[], dict[str, Any]] = dict
        """What the capture side knows of itself, as fields of SelfStats."""
        self.idle: Callable[[], None] = lambda: None
        """Called about once a second."""
        self.in_group: Callable[[Identity], Identity] | None = None
        """Gives another identity once there is a process group; asked until then, and not after the first step."""
        self.reduction: Reduction | None = None
        """Makes norms of shares to those of the model; waits for the other ranks."""
        self._missed: collections.deque[int] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="gradexporter-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._refresh()
        self._thread.start()

    def submit(self, pending: Pending) -> None:
        """Queues a sealed step; drops the oldest rather than let training wait."""
        if self._queue.qsize() >= MOST_PENDING:
            self._drop_oldest()
        self._queue.put(("step", pending))

    def tell(self, what: str, value: Any) -> None:
        """Queues a fact about the run: its phase, a checkpoint, its end."""
        self._queue.put((what, value))

    def drain(self, timeout: float) -> bool:
        """Waits until everything queued is published; False if that took longer than ``timeout`` seconds."""
        reached = threading.Event()
        self._queue.put(("reached", reached))
        return reached.wait(timeout)

    def ask(self, question: Callable[[tuple[Judge, ...], tuple[int, ...]], Answer], timeout: float) -> Answer | None:
        """What ``question`` makes of judges and checkpoints once everything queued is judged, between two steps.

        None if that takes longer than ``timeout`` seconds, or if it raises, which is counted.
        """
        answers: list[Answer] = []
        answered = threading.Event()

        def answer() -> None:
            try:
                answers.append(question(tuple(self._judges), self._tally.checkpoints))
            finally:
                answered.set()

        if self._thread.is_alive():
            self._queue.put(("ask", answer))
            answered.wait(timeout)
        else:
            answer()
        return answers[0] if answers else None

    def resume(self, past: Past) -> None:
        """Judges the steps from now on as those of a run that goes on."""
        self._queue.put(("resume", past))

    def stop(self, timeout: float) -> None:
        """Ends the thread after what is queued, or after ``timeout`` seconds."""
        self._queue.put(("stop", None))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, or was never started."""
        return not self._thread.is_alive()

    def _drop_oldest(self) -> None:
        try:
            what, value = self._queue.get_nowait()
        except queue.Empty:
            return
        if what == "step":
            self._dropped += 1
            self._missed.append(value.step)
        else:
            self._queue.put((what, value))

    def _run(self) -> None:
        while True:
            try:
                what, value = self._queue.get(timeout=1.0)
            except queue.Empty:
                what, value = "idle", None
            if what == "stop":
                self._leave()
                return
            began = time.thread_time()
            try:
                self._handle(what, value)
            except Exception as error:
                self._fence.record("publish", error)
            self._seconds += time.thread_time() - began

    def _handle(self, what: str, value: Any) -> None:
        if what == "step":
            self._step(value)
        elif what == "idle":
            self.idle()
            self._settle()
            self._refresh()
        elif what == "reached":
            published = self.snapshot.itself
            signals = self.facts().get("signal_available", {})
            if self._fence.failures != published.failures or signals != published.signal_available:
                self._refresh()
            value.set()
        elif what == "phase":
            self.snapshot = self._tally.phase(value)
        elif what == "checkpoint":
            self.snapshot = self._tally.checkpoint(value)
        elif what == "ask":
            value()
        elif what == "resume":
            self._resume(value)
        elif what == "end":
            self.snapshot = self._tally.end(value, self._itself())

    def _leave(self) -> None:
        if self.reduction is not None:
            with self._fence.guarding("readback"):
                self.reduction.leave()

    def _reduced(self, report: StepReport | None, pending: Pending) -> StepReport | None:
        """The report with the norms of the model; every step is contributed to, in order, whatever became of it."""
        while self._missed:
            missed = self._missed.popleft()
            if self.reduction is not None:
                self.reduction.skip(missed)
        if self.reduction is None:
            return report
        if report is None:
            self.reduction.skip(pending.step)
            return None
        plan = pending.plan
        unknown = plan.owners[list(pending.unknown)].tolist()
        return self.reduction.add(report, unknown, empty=not len(plan.owners))

    def _resume(self, past: Past) -> None:
        self._judges = list(past.judges)
        self._said = {}
        if past.step:
            self.snapshot = self._tally.resume(past.checkpoints, past.step, past.timestamp)

    def _step(self, pending: Pending) -> None:
        self._settle()
        self.in_group = None  # a run keeps the name that its first step went out under
        report = None
        with self._fence.guarding("readback"):
            report = self._reader.report(pending)
        with self._fence.guarding("readback"):
            report = self._reduced(report, pending)
        if report is None:
            return
        try:
            judged = self._judges[pending.optimizer](report)
        except Exception as error:
            self._fence.record("judge", error)
            judged = report  # measured but not judged, and the series says so
        odd = judged.state not in (None, State.WARMING_UP, State.HEALTHY)
        if odd or any(finding.severity is not Severity.INFO for finding in judged.findings):
            self._cadence.arm(judged.step)
        self.findings.extend(judged.findings)
        self.report = judged
        self.snapshot = self._tally.add(judged, self._itself())
        self._say(judged)

    def _settle(self) -> None:
        """Takes rank and run id from a process group that was made after ``watch``."""
        if self.in_group is None:
            return
        with self._fence.guarding("publish"):
            own = self.snapshot.identity
            settled = self.in_group(own)
            if settled is not own:
                self.in_group = None
                self.snapshot = self._tally.identify(settled)

    def _say(self, report: StepReport) -> None:
        for finding in report.findings:
            if finding.severity is not Severity.CRITICAL:
                continue
            fresh = report.step - self._said.get(finding.kind, -SAY_AGAIN_STEPS) >= SAY_AGAIN_STEPS
            self._said[finding.kind] = report.step
            if fresh:
                _log.warning(
                    "gradexporter: step %d: %s%s%s; %s",
                    report.step,
                    finding.kind,
                    _place(finding.layer),
                    _size(finding.ratio),
                    "no healthy step yet"
                    if report.last_healthy_step is None
                    else f"last healthy step {report.last_healthy_step}",
                )

    def _refresh(self) -> None:
        """Publishes what changed without a step: faults, lag, cost."""
        self.snapshot = self._tally.refresh(self._itself())

    def _itself(self) -> SelfStats:
        facts = self.facts()
        facts["overhead_seconds"] = facts.get("overhead_seconds", 0.0) + self._seconds
        return SelfStats(
            readback_lag_steps=self._queue.qsize(),
            reports_dropped=self._dropped,
            failures=self._fence.failures,
            **facts,
        )


def _size(ratio: float | None) -> str:
    """A value against its baseline, one below it as a fraction."""
    if ratio is None:
        return ""
    return f", 1/{1 / ratio:.3g} of its baseline" if 0 < ratio < 1 else f", {ratio:.3g} times its baseline"


def _place(layer: str | None) -> str:
    if layer is None:
        return ""
    return f" in the {layer}" if layer in ("loss", "input") else f" in layer {layer}"
