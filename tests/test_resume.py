"""Saving a run and going on with it: a good restart raises nothing, a bad one is a mismatch."""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradexporter
from gradexporter.hooks.cadence import ARMED_STEPS, EVERY_STEP_AT_FIRST
from gradexporter.monitor import Monitor
from gradexporter.records import Finding, FindingKind, Severity, Shape, State, StepReport

SAVED_AT = 120
"""Step at which the runs of this file are saved."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),  # its state is there before its first step
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}

WORLD = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def net(seed: int = 0, width: int = 24) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 4))


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return x, (x @ WORLD).argmax(1)


class Run:
    """A training run under watch that can be saved and continued."""

    def __init__(self, watch: Callable[..., Monitor], kind: str, seed: int = 0, **settings: Any) -> None:
        self.model = net(seed)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.monitor = watch(self.model, self.optimizer, **settings)

    def train(self, steps: int, first_batch: int) -> StepReport:
        for number in range(first_batch, first_batch + steps):
            x, y = batch(number)
            loss = self.monitor.observe(nn.functional.cross_entropy(self.model(x), y))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        assert self.monitor.flush()
        assert self.monitor.report is not None
        return self.monitor.report

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "monitor": self.monitor.state_dict(),
            },
            file,
        )
        return file.getvalue()

    def load(self, saved: bytes, *, optimizer: bool = True, monitor: bool = True) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        if monitor:
            assert self.monitor.load_state_dict(state["monitor"])


_saved: dict[str, bytes] = {}


@pytest.fixture
def saved(watch: Callable[..., Monitor]) -> Callable[[str], bytes]:
    """The checkpoint of a healthy run with this optimizer."""

    def run(kind: str) -> bytes:
        if kind not in _saved:
            first = Run(watch, kind)
            assert first.train(SAVED_AT, 0).state is State.HEALTHY
            assert first.monitor.findings == ()
            _saved[kind] = first.save()
        return _saved[kind]

    return run


def warnings(monitor: Monitor) -> list[Finding]:
    return [finding for finding in monitor.findings if finding.severity is not Severity.INFO]


# -- a good restart -------------------------------------------------------------------------------


@pytest.mark.matrix("resume")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first_batch", [SAVED_AT, 9000], ids=["same order", "other data order"])
def test_a_good_restart_raises_nothing(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes], kind: str, first_batch: int
) -> None:
    run = Run(watch, kind, seed=1)
    run.load(saved(kind))

    report = run.train(1, first_batch)
    assert (report.step, report.state, report.last_healthy_step) == (SAVED_AT + 1, State.HEALTHY, SAVED_AT + 1)
    report = run.train(200, first_batch + 1)

    assert report.step == SAVED_AT + 201
    assert report.diagnosis is None
    assert run.monitor.findings == ()


@pytest.mark.matrix("resume")
@pytest.mark.parametrize("kind", ["fused adamw", "sgd with momentum"])
def test_a_restart_without_a_saved_state_warms_up_and_raises_nothing(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes], kind: str
) -> None:
    run = Run(watch, kind, seed=1, start_step=SAVED_AT + 1)
    run.load(saved(kind), monitor=False)

    assert run.train(1, SAVED_AT).state is State.WARMING_UP
    assert run.train(200, SAVED_AT + 1).step == SAVED_AT + 201
    assert run.monitor.findings == ()


def test_a_continued_run_has_the_baselines_of_one_that_went_on(watch: Callable[..., Monitor]) -> None:
    whole = Run(watch, "adam", state_every=1, activation_every=1)
    whole.train(60, 0)
    saved = whole.save()
    run = Run(watch, "adam", seed=1, state_every=1, activation_every=1)
    run.load(saved)

    went_on, continued = whole.train(40, 60), run.train(40, 60)

    for name, value in (
        ("step", went_on.step),
        ("gradient_norm", went_on.gradient_norm),
        ("gradient_norm_baseline", went_on.gradient_norm_baseline),
        ("gradient_spike_ratio", went_on.gradient_spike_ratio),
        ("last_healthy_step", went_on.last_healthy_step),
    ):
        assert getattr(continued, name) == pytest.approx(value, rel=1e-9), name
    theirs, ours = continued.layers.column("spike_ratio"), went_on.layers.column("spike_ratio")
    assert theirs is not None
    assert ours is not None
    assert theirs[0] == pytest.approx(ours[0], rel=1e-9)


def test_a_spike_after_a_restart_is_seen_without_a_warm_up(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes]
) -> None:
    run = Run(watch, "adam", seed=1)
    run.load(saved("adam"))
    run.train(9, SAVED_AT)

    x, y = batch(0)
    (nn.functional.cross_entropy(run.model(x), y) * 1000).backward()
    run.optimizer.step()
    assert run.monitor.flush()

    assert run.monitor.report is not None
    assert run.monitor.report.state is State.SPIKE


def test_the_end_of_a_schedule_is_no_stall_after_a_restart(watch: Callable[..., Monitor]) -> None:
    first = Run(watch, "adam", state_every=1)
    for number, rate in enumerate((1e-3, 1e-5, 1e-7, 1e-9)):
        for group in first.optimizer.param_groups:
            group["lr"] = rate
        first.train(15, number * 15)
    saved = first.save()

    run = Run(watch, "adam", seed=1, state_every=1)
    run.load(saved)
    for group in run.optimizer.param_groups:
        group["lr"] = 2e-12
    run.train(40, 60)

    assert warnings(run.monitor) == []


# -- a bad one ------------------------------------------------------------------------------------


@pytest.mark.matrix("resume")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("warm", [True, False], ids=["saved baselines", "start_step alone"])
def test_an_optimizer_whose_state_was_lost_is_a_mismatch(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes], kind: str, warm: bool
) -> None:
    run = Run(watch, kind, seed=1, **({} if warm else {"start_step": SAVED_AT + 1}))
    run.load(saved(kind), optimizer=False, monitor=warm)

    report = run.train(1, SAVED_AT)

    (found,) = report.findings
    assert (found.kind, found.step, found.value) == (FindingKind.OPTIMIZER_STATE_JUMP, SAVED_AT + 1, 0.0)
    assert found.severity is Severity.WARNING
    assert report.diagnosis is not None
    assert report.diagnosis.shape is Shape.RESUME_MISMATCH
    assert report.diagnosis.evidence == (
        f"Step {SAVED_AT + 1}: the optimizer began from nothing though the run goes on: its state was not restored.",
    )
    report = run.train(40, SAVED_AT + 1)
    assert {finding.step for finding in warnings(run.monitor)} == {SAVED_AT + 1}
    assert report.diagnosis is not None
    assert (report.diagnosis.shape, report.diagnosis.severity) == (Shape.RESUME_MISMATCH, Severity.INFO)


@pytest.mark.matrix("resume")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_wrong_learning_rate_is_a_mismatch(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes], kind: str
) -> None:
    run = Run(watch, kind, seed=1)
    run.load(saved(kind))
    for group in run.optimizer.param_groups:
        group["lr"] *= 30

    report = run.train(1, SAVED_AT)
    assert FindingKind.LEARNING_RATE_JUMP in {finding.kind for finding in warnings(run.monitor)}
    for _ in range(10):
        assert report.diagnosis is not None
        assert report.diagnosis.shape is Shape.RESUME_MISMATCH
        report = run.train(2, report.step)


def test_a_lower_learning_rate_is_what_one_restarts_with_after_a_failure(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes]
) -> None:
    run = Run(watch, "adam", seed=1)
    run.load(saved("adam"))
    for group in run.optimizer.param_groups:
        group["lr"] /= 10

    assert run.train(20, SAVED_AT).diagnosis is None
    assert [finding.kind for finding in run.monitor.findings] == [FindingKind.LEARNING_RATE_JUMP]
    assert warnings(run.monitor) == []


def test_a_state_that_is_there_and_was_never_stepped_is_lost_too(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes]
) -> None:
    run = Run(watch, "adam", seed=1)
    run.load(saved("adam"))
    for state in run.optimizer.state.values():
        for value in state.values():
            value.zero_()

    report = run.train(1, SAVED_AT)

    assert report.diagnosis is not None
    assert report.diagnosis.shape is Shape.RESUME_MISMATCH


def test_an_optimizer_that_keeps_no_state_cannot_lose_it(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, start_step=501)

    for number in range(3):
        x, y = batch(number)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert monitor.flush()

    assert monitor.findings == ()
    assert monitor.report is not None
    assert monitor.report.step == 503


def test_an_update_that_the_scaler_skips_does_not_hide_a_lost_state(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = watch(model, optimizer, scaler, start_step=501)

    for number in range(2):
        x, y = batch(number)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if number == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.flush()

    assert [finding.step for finding in monitor.findings if finding.kind is FindingKind.OPTIMIZER_STATE_JUMP] == [502]


@pytest.mark.matrix("resume")
def test_of_several_optimizers_the_one_that_was_lost_is_named(watch: Callable[..., Monitor]) -> None:
    def build(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], Monitor]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"body": nn.Linear(8, 16), "head": nn.Linear(16, 4)})
        optimizers = [
            torch.optim.SGD(model["body"].parameters(), lr=1e-2, momentum=0.9),
            torch.optim.Adam(model["head"].parameters(), lr=1e-3),
        ]
        return model, optimizers, watch(model, optimizers)

    def train(model: Any, optimizers: list[torch.optim.Optimizer], first: int, steps: int) -> None:
        for number in range(first, first + steps):
            x, y = batch(number)
            model.zero_grad()
            nn.functional.cross_entropy(model["head"](model["body"](x).relu()), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    model, optimizers, monitor = build(0)
    train(model, optimizers, 0, 60)
    state = monitor.state_dict()
    weights, states = model.state_dict(), [copy.deepcopy(one.state_dict()) for one in optimizers]

    for lost in (None, 1):
        model, optimizers, monitor = build(1)
        model.load_state_dict(weights)
        for index, optimizer in enumerate(optimizers):
            if index != lost:
                optimizer.load_state_dict(copy.deepcopy(states[index]))
        assert monitor.load_state_dict(state)
        train(model, optimizers, 60, 100)
        assert monitor.flush()

        found = warnings(monitor)
        assert [finding.step for finding in found] == ([] if lost is None else [122])
        reports = monitor.snapshot.reports if monitor.snapshot is not None else ()
        shapes = [report.diagnosis.shape if report.diagnosis else None for report in reports]
        assert shapes == [None, None if lost is None else Shape.RESUME_MISMATCH]


# -- numbering, rhythm, checkpoints ---------------------------------------------------------------


def test_a_start_step_that_was_given_wins_over_the_saved_count(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes]
) -> None:
    run = Run(watch, "adam", seed=1, start_step=1001)
    run.load(saved("adam"))

    report = run.train(1, SAVED_AT)

    assert (report.step, report.state) == (1001, State.HEALTHY)


def test_a_continued_run_is_not_measured_in_full_for_as_long_as_a_new_one(watch: Callable[..., Monitor]) -> None:
    first = Run(watch, "adam", overhead_budget=1e-9)
    first.train(EVERY_STEP_AT_FIRST + 1, 0)
    state = first.monitor.state_dict()
    run = Run(watch, "adam", seed=1, overhead_budget=1e-9)
    run.optimizer.load_state_dict(first.optimizer.state_dict())
    assert run.monitor.load_state_dict(state)

    full = [
        report.step
        for report in (run.train(1, number) for number in range(40))
        if report.parameter_max_abs is not None and report.activation_max_abs is not None
    ]

    resumed = EVERY_STEP_AT_FIRST + 2
    armed = list(range(resumed, resumed + ARMED_STEPS + 1))
    assert full == armed + [step for step in range(armed[-1] + 1, resumed + 40) if (step - 1) % 10 == 0]


def test_the_checkpoint_that_a_run_goes_on_from_is_its_last_clean_one(
    watch: Callable[..., Monitor], saved: Callable[[str], bytes]
) -> None:
    run = Run(watch, "adam", seed=1)
    run.load(saved("adam"))
    run.train(1, SAVED_AT)

    snapshot = run.monitor.snapshot
    assert snapshot is not None
    assert snapshot.last_checkpoint_step == SAVED_AT
    assert snapshot.last_clean_checkpoint_step == SAVED_AT
    assert snapshot.last_checkpoint_timestamp is not None


@pytest.mark.matrix("resume")
def test_a_run_may_go_back_to_a_checkpoint_while_it_is_watched(watch: Callable[..., Monitor]) -> None:
    run = Run(watch, "adam")
    run.train(60, 0)
    saved = run.save()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(50)
    assert run.train(20, 60).state is not State.HEALTHY

    run.load(saved)
    before = len(run.monitor.findings)
    report = run.train(40, 60)

    assert (report.step, report.state, report.diagnosis) == (100, State.HEALTHY, None)
    assert len(run.monitor.findings) == before


# -- what is saved --------------------------------------------------------------------------------


def plain(value: Any) -> bool:
    """Made of exactly the types that JSON and a safe load know."""
    if type(value) is dict:
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_the_state_is_plain_python(watch: Callable[..., Monitor], saved: Callable[[str], bytes]) -> None:
    state = torch.load(io.BytesIO(saved("adam")), weights_only=True)["monitor"]

    assert plain(state)
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    run = Run(watch, "adam", seed=1)
    run.load(saved("adam"), monitor=False)
    assert run.monitor.load_state_dict(json.loads(json.dumps(state)))
    assert run.train(1, SAVED_AT).state is State.HEALTHY


def test_every_step_that_has_closed_is_in_the_state(watch: Callable[..., Monitor]) -> None:
    run = Run(watch, "adam")
    for number in range(30):
        x, y = batch(number)
        nn.functional.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
    at_once = run.monitor.state_dict()
    assert run.monitor.flush()
    later = run.monitor.state_dict()

    assert at_once["step"] == 30
    assert {**at_once, "timestamp": 0} == {**later, "timestamp": 0}


def test_a_closed_monitor_still_tells_its_state(watch: Callable[..., Monitor]) -> None:
    run = Run(watch, "adam")
    run.train(30, 0)
    before = run.monitor.state_dict()
    run.monitor.close()
    after = run.monitor.state_dict()

    assert {**before, "timestamp": 0} == {**after, "timestamp": 0}
    assert run.monitor.load_state_dict(before) is False


def test_a_state_from_before_the_first_step_is_one_too(watch: Callable[..., Monitor]) -> None:
    state = Run(watch, "adam").monitor.state_dict()
    run = Run(watch, "adam")

    assert run.monitor.load_state_dict(state) is True
    report = run.train(1, 0)
    assert (report.step, report.state) == (1, State.WARMING_UP)


def test_saving_and_loading_change_nothing_in_training(watch: Callable[..., Monitor]) -> None:
    def train(watched: bool) -> list[Tensor]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        monitor = watch(model, optimizer) if watched else gradexporter.watch(model, optimizer, disabled=True)
        for number in range(20):
            x, y = batch(number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number % 5 == 4:
                monitor.load_state_dict(monitor.state_dict())
        return [parameter.detach() for parameter in model.parameters()]

    for mine, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, theirs)


# -- what cannot be continued from ----------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the package logs."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("gradexporter")
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)


def altered(state: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


FOREIGN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nothing": (lambda state: None, "a saved state is a dict, this is a NoneType"),
    "empty": (lambda state: {}, "nothing was saved"),
    "text": (lambda state: "state", "this is a str"),
    "another dict": (lambda state: {"model": 1}, "no state of a monitor"),
    "another version": (lambda state: altered(state, "gradexporter", value=7), "of version 7, and 1 is known"),
    "another optimizer": (
        lambda state: altered(state, "optimizers", 0, "kind", value="SGD"),
        "the saved run had the optimizer SGD, this one has Adam",
    ),
    "another number of optimizers": (
        lambda state: altered(state, "optimizers", value=state["optimizers"] * 2),
        "the saved run had 2 optimizers, this one has 1",
    ),
    "another layer": (
        lambda state: altered(state, "optimizers", 0, "layers", "head", value=10),
        "only the saved model has the layer 'head'",
    ),
    "another size": (
        lambda state: altered(state, "optimizers", 0, "layers", "3", value=10),
        "the layer '3' had another size",
    ),
    "judge cut off": (lambda state: altered(state, "optimizers", 0, "judge", value={}), "version None"),
    "series cut off": (
        lambda state: altered(
            state, "optimizers", 0, "judge", "optimizers", "0", "detector", "baselines", "series", value=[1]
        ),
        "damaged",
    ),
    "a baseline of NaN": (
        lambda state: altered(
            state,
            *("optimizers", 0, "judge", "optimizers", "0", "detector", "baselines", "series", "gradient_norm"),
            value=[float("nan"), 0.0, 3],
        ),
        "a baseline must be finite",
    ),
    "a step that is none": (lambda state: altered(state, "step", value="many"), "'many' is no step"),
    "no cadence": (lambda state: altered(state, "cadence", value=None), "damaged"),
}


@pytest.mark.matrix("resume")
@pytest.mark.parametrize("what", FOREIGN)
def test_a_state_that_cannot_be_continued_from_is_a_line_in_the_log_and_a_cold_start(
    watch: Callable[..., Monitor], lines: list[str], what: str
) -> None:
    first = Run(watch, "adam")
    first.train(30, 0)
    make, reason = FOREIGN[what]
    model = net(seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gradexporter.watch(model, optimizer, serve=False) as monitor:
        assert monitor.load_state_dict(make(first.monitor.state_dict())) is False

        (line,) = lines
        assert line.startswith("gradexporter: nothing is continued, baselines are learned anew: ")
        assert reason in line
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert monitor.flush()
        assert monitor.report is not None
        assert (monitor.report.step, monitor.report.state) == (1, State.WARMING_UP)
        assert monitor.snapshot is not None
        failures = {part: count for part, count in monitor.snapshot.itself.failures.items() if count}
        assert failures == ({} if what in ("nothing", "empty") else {"resume": 1})


def test_a_monitor_that_is_disabled_has_no_state_and_takes_any(watch: Callable[..., Monitor]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inert = watch(model, optimizer, disabled=True)

    assert inert.state_dict() == {}
    for state in ({}, None, "garbage", Run(watch, "adam").monitor.state_dict()):
        assert inert.load_state_dict(state) is False
