"""watch() and Monitor: bad input, faults of ours, and a life cycle that leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import re
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradexporter
from gradexporter import ConfigError, Monitor
from gradexporter import monitor as monitors


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


@pytest.fixture
def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    yield
    leftover = [thread for thread in threading.enumerate() if thread.name.startswith("gradexporter")]
    for thread in leftover:  # one that was told to stop by the garbage collector is not waited for there
        thread.join(5)
    assert [thread.name for thread in leftover if thread.is_alive()] == []


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


class TestBadInput:
    def test_a_model_that_is_no_module(self, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, got list: pass the model itself"):
            gradexporter.watch([1], optimizer)

    def test_an_optimizer_that_is_none(self, model: nn.Module) -> None:
        with pytest.raises(ConfigError, match=r"optimizer must be a torch\.optim\.Optimizer .*, got float: pass"):
            gradexporter.watch(model, 0.1)

    def test_no_optimizer_at_all(self, model: nn.Module) -> None:
        with pytest.raises(ConfigError, match="empty sequence: pass the optimizers"):
            gradexporter.watch(model, [])

    def test_an_optimizer_of_another_model(self, model: nn.Module) -> None:
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

        with pytest.raises(ConfigError, match=r"\(SGD\) holds none of the model's parameters: pass the optimizer"):
            gradexporter.watch(model, other)

    def test_a_scaler_that_is_none(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(ConfigError, match=r"scaler must be a torch\.amp\.GradScaler or None, got int"):
            gradexporter.watch(model, optimizer, 5)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"prot": 9000}, "unknown setting 'prot'; did you mean 'port'?"),
            ({"xyzzy": 1}, "unknown setting 'xyzzy'; known settings: "),
            ({"port": 70000}, "port cannot be 70000: give 1 to 65535"),
            ({"port": "http"}, "port cannot be 'http': give a port number"),
            ({"port": True}, "port cannot be True: give a port number"),
            ({"activation_every": 0}, "activation_every cannot be 0: give 1 for every step"),
            ({"overhead_budget": 2}, "overhead_budget cannot be 2: give a share"),
            ({"labels": {"job": "x"}}, "labels cannot be 'job': this label belongs to Prometheus"),
            ({"labels": {"a-b": "x"}}, "labels cannot be 'a-b': label names are"),
            ({"labels": {"a": 1}}, r"labels['a'] cannot be 1: label values are strings"),
            ({"max_series": 10}, "max_series cannot be 10: give 200 or more"),
            ({"start_step": -1}, "start_step cannot be -1: steps count from 1"),
            ({"start_step": 0}, "start_step cannot be 0: steps count from 1; give 1 for a new run"),
            ({"run_id": ""}, "run_id cannot be '': give a name, or None"),
            ({"attempt": ""}, "attempt cannot be '': give a name, or None"),
            ({"attempt": -1}, "attempt cannot be -1: give a string such as '1'"),
        ],
    )
    def test_a_setting_that_cannot_be_used(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            gradexporter.watch(model, optimizer, **settings)

        assert text in str(caught.value)
        assert len(model[0]._forward_hooks) == 0

    @pytest.mark.parametrize(
        ("variable", "value", "text"),
        [
            ("GRADEXPORTER_PORT", "99999", "GRADEXPORTER_PORT='99999' cannot be used: port cannot be 99999"),
            ("GRADEXPORTER_PORT", "http", "GRADEXPORTER_PORT='http' cannot be used: give a whole number"),
            ("GRADEXPORTER_PAGING", "maybe", "GRADEXPORTER_PAGING='maybe' cannot be used: give 1 or 0"),
            ("GRADEXPORTER_LABELS", "team", "'team' is no pair; give name=value,name=value"),
            ("GRADEXPORTER_DISABLED", "2", "GRADEXPORTER_DISABLED='2' cannot be used: give 1 or 0"),
        ],
    )
    def test_a_variable_that_cannot_be_used(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        monkeypatch: pytest.MonkeyPatch,
        variable: str,
        value: str,
        text: str,
    ) -> None:
        monkeypatch.setenv(variable, value)

        with pytest.raises(ConfigError) as caught:
            gradexporter.watch(model, optimizer)

        assert text in str(caught.value)

    def test_the_log_line_of_a_run_that_was_never_healthy_says_so(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            optimizer.step()
            monitor.flush()

        assert any(line.endswith("; no healthy step yet") for line in caplog.messages)

    def test_a_misspelt_variable_is_pointed_out(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("GRADEXPORTER_PAGIN", "0")

        gradexporter.watch(model, optimizer, serve=False).close()

        expected = (
            "gradexporter: the environment sets GRADEXPORTER_PAGIN, which nothing reads; "
            "did you mean GRADEXPORTER_PAGING?"
        )
        assert expected in caplog.messages

    def test_an_empty_variable_leaves_the_run_its_own_id(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADEXPORTER_RUN_ID", "")
        monkeypatch.setenv("GRADEXPORTER_ATTEMPT", "")

        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            assert monitor.snapshot is not None
            assert monitor.snapshot.identity.run_id != ""
            assert monitor.snapshot.identity.attempt == "0"

    def test_the_same_optimizer_twice(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(ConfigError, match="the same object twice: pass each optimizer once"):
            gradexporter.watch(model, [optimizer, optimizer])

    def test_a_lazy_model(self) -> None:
        model = nn.Sequential(nn.LazyLinear(3))

        with pytest.raises(ConfigError, match="run one forward with a sample batch first"):
            gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_a_scripted_model(self) -> None:
        model = torch.jit.script(nn.Linear(2, 2))

        with pytest.raises(ConfigError, match="TorchScript takes no hooks; watch the Python module instead"):
            gradexporter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


class TestSwitches:
    def test_disabled_is_an_inert_monitor(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADEXPORTER_DISABLED", "1")

        monitor = gradexporter.watch(model, optimizer)
        loss = step(model, optimizer)

        assert monitor.observe(loss) is loss
        assert monitor.flush()
        assert monitor.report is None
        assert monitor.findings == ()
        assert monitor.snapshot is None
        assert monitor.port is None
        monitor.checkpoint_saved("x")
        monitor.close()
        assert len(model[0]._forward_hooks) == 0

    def test_an_argument_wins_over_the_environment(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRADEXPORTER_RUN_ID", "from-environment")
        monkeypatch.setenv("GRADEXPORTER_PAGING", "0")
        monkeypatch.setenv("GRADEXPORTER_LABELS", "team=vision, tier=gold")

        with gradexporter.watch(model, optimizer, serve=False, run_id="given") as monitor:
            assert monitor.snapshot is not None
            identity = monitor.snapshot.identity

        assert identity.run_id == "given"
        assert identity.paging is False
        assert identity.labels == {"team": "vision", "tier": "gold"}

    @pytest.mark.parametrize(
        ("environment", "run_id"),
        [
            ({"GRADEXPORTER_RUN_ID": "a", "SLURM_JOB_ID": "b"}, "a"),
            ({"GRADEXPORTER_JOB_UID": "uid", "TORCHELASTIC_RUN_ID": "t"}, "uid"),
            ({"TORCHELASTIC_RUN_ID": "t", "SLURM_JOB_ID": "b"}, "t"),
            ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "b"}, "b"),
        ],
    )
    def test_the_run_id_is_the_launchers(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        monkeypatch: pytest.MonkeyPatch,
        environment: dict[str, str],
        run_id: str,
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            assert monitor.snapshot is not None
            assert monitor.snapshot.identity.run_id == run_id

    def test_without_a_launcher_two_runs_have_two_ids(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = set()
        for _ in range(2):
            with gradexporter.watch(model, optimizer, serve=False) as monitor:
                assert monitor.snapshot is not None
                ids.add(monitor.snapshot.identity.run_id)

        assert len(ids) == 2


class TestNothingOfOursRaises:
    @pytest.mark.parametrize(
        "loss", [torch.ones(3), "high", [1.0], torch.ones(1, dtype=torch.complex64), True, object()], ids=repr
    )
    def test_a_loss_that_is_no_scalar_comes_back_and_is_counted(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            for _ in range(3):
                assert monitor.observe(loss) is loss
                step(model, optimizer)
            assert monitor.flush()
            assert monitor.report is not None
            assert monitor.report.loss is None
            assert monitor.snapshot is not None
            assert monitor.snapshot.itself.failures["observe"] == 3

        assert caplog.text.count("a loss must be a tensor of one element or a float") == 1

    def test_a_hook_of_ours_that_fails_is_counted_and_training_goes_on(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Hostile(nn.Linear):
            def forward(self, x: Tensor) -> Any:
                return {"out": super().forward(x), "odd": HostileTensor(torch.ones(2))}

        class HostileTensor(Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise RuntimeError("not for you")

        hostile = Hostile(4, 1)
        other = torch.optim.SGD(hostile.parameters(), lr=0.1)
        with gradexporter.watch(hostile, other, serve=False) as monitor:
            for _ in range(2):
                hostile(torch.ones(2, 4))["out"].mean().backward()
                other.step()
            assert monitor.flush()
            assert monitor.report is not None
            assert monitor.report.step == 2
            assert monitor.snapshot is not None
            assert monitor.snapshot.itself.failures["hooks"] >= 2

        assert caplog.text.count("hooks failed") == 1

    def test_a_taken_port_moves_on_and_says_so(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with (
                caplog.at_level(logging.INFO, "gradexporter"),
                gradexporter.watch(model, optimizer, host="127.0.0.1", port=port) as monitor,
            ):
                assert monitor.port is not None
                assert monitor.port != port
                assert str(port) in caplog.text
                assert str(monitor.port) in caplog.text

    def test_an_address_that_cannot_be_bound_costs_the_endpoint_and_no_more(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        with gradexporter.watch(model, optimizer, host="203.0.113.7") as monitor:
            step(model, optimizer)
            assert monitor.flush()
            assert monitor.port is None
            assert monitor.url is None
            assert monitor.report is not None
            assert monitor.snapshot is not None
            assert monitor.snapshot.itself.failures["endpoint"] == 1

    def test_an_endpoint_whose_socket_vanishes_does_not_reach_training(self) -> None:
        program = """
            import os, socket
            import torch
            import gradexporter

            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with gradexporter.watch(model, optimizer, host="127.0.0.1", port=0) as monitor:
                for name in os.listdir("/proc/self/fd"):
                    try:
                        target = os.readlink(f"/proc/self/fd/{name}")
                    except OSError:
                        continue
                    if target.startswith("socket:"):
                        with socket.socket(fileno=os.dup(int(name))) as twin:
                            listens = twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        if listens:
                            os.close(int(name))
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                assert monitor.flush()
                assert monitor.report is not None
        """
        # In a process of its own: a number that is closed behind somebody's back is soon somebody else's.
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def test_an_error_of_the_users_own_passes_through_unchanged(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, 5))
            step(model, optimizer)
            assert monitor.flush()
            assert monitor.report is not None
            assert monitor.report.activation_max_abs is not None


class TestLife:
    def test_watch_close_watch_again(self, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            monitor = gradexporter.watch(model, optimizer, host="127.0.0.1", port=0)
            step(model, optimizer)
            assert monitor.flush()
            assert monitor.report is not None
            assert monitor.report.step == 1
            url = monitor.url
            assert url is not None
            monitor.close()
            monitor.close()
            assert monitor.report is not None
            with pytest.raises(OSError, match="refused"):
                urllib.request.urlopen(url, timeout=2)

        assert len(model[0]._forward_hooks) == 0
        assert len(model._forward_pre_hooks) == 0
        assert len(optimizer._optimizer_step_pre_hooks) == 0
        assert not model[0].weight._post_accumulate_grad_hooks
        assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"
        assert not hasattr(torch.amp.GradScaler.step, "_gradexporter")

    def test_close_judges_what_was_still_open(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        monitor = gradexporter.watch(model, optimizer, serve=False)
        step(model, optimizer)
        monitor.close()

        assert monitor.report is not None
        assert monitor.report.step == 1
        assert monitor.snapshot is not None
        assert monitor.snapshot.ended == "closed"

    def test_an_exception_ends_the_run_as_one(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        monitor = gradexporter.watch(model, optimizer, serve=False)
        step(model, optimizer)
        with pytest.raises(ZeroDivisionError), monitor:
            raise ZeroDivisionError

        assert monitor.snapshot is not None
        assert monitor.snapshot.ended == "exception"

    def test_a_monitor_that_nobody_kept_watches_on_and_goes_with_the_model(self) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gone = weakref.ref(model)
        kept = weakref.ref(gradexporter.watch(model, optimizer, serve=False))
        gc.collect()
        step(model, optimizer)

        monitor = kept()
        assert monitor is not None
        assert monitor.flush()
        assert monitor.report is not None
        del monitor, model, optimizer
        gc.collect()
        assert gone() is None
        assert kept() is None

    def test_no_tensor_of_the_user_outlives_its_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            x = torch.ones(2, 4)
            output = model(x)
            loss = monitor.observe(output.square().mean(), inputs=x, targets=output.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            references = [weakref.ref(tensor) for tensor in (x, output, loss)]
            del x, output, loss

            assert [reference() for reference in references] == [None, None, None]

    def test_a_checkpoint_is_clean_when_the_run_was_healthy(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            for _ in range(30):
                step(model, optimizer)
            monitor.checkpoint_saved("checkpoint.pt")
            assert monitor.flush()
            assert monitor.snapshot is not None
            assert monitor.snapshot.last_checkpoint_step == 30
            assert monitor.snapshot.last_clean_checkpoint_step == 30

    def test_evaluation_is_a_phase_of_its_own(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            assert monitor.snapshot is not None
            step(model, optimizer)
            model.eval()
            model(torch.ones(1, 4))
            assert monitor.flush()
            assert monitor.snapshot.phase == "eval"
            model.train()
            step(model, optimizer)
            assert monitor.flush()
            assert monitor.snapshot.phase == "train"
            with monitor.phase("checkpoint"):
                assert monitor.flush()
                assert monitor.snapshot.phase == "checkpoint"

    def test_a_closed_step_is_published_after_a_second_without_anything_else(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        with gradexporter.watch(model, optimizer, serve=False) as monitor:
            step(model, optimizer)
            deadline = threading.Event()
            for _ in range(100):
                if monitor.report is not None:
                    break
                deadline.wait(0.1)

            assert monitor.report is not None

    @pytest.mark.parametrize("healthy", [True, False])
    def test_only_a_run_that_ends_unhealthy_while_it_is_scraped_waits_for_its_last_scrape(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, healthy: bool
    ) -> None:
        monitor = gradexporter.watch(model, optimizer, host="127.0.0.1", port=0)
        for _ in range(30):
            step(model, optimizer)
        if not healthy:
            monitor.observe(float("nan"))
        assert monitor.flush()
        url = monitor.url
        assert url is not None
        pause = threading.Event()
        for _ in range(3):
            urllib.request.urlopen(url + "/metrics", timeout=5).read()
            pause.wait(0.5)
        parts = monitor._parts
        assert parts is not None
        assert parts.endpoint is not None
        hold = monitors._hold_seconds(parts, parts.endpoint, None)
        assert hold == 0.0 if healthy else 1.0 <= hold <= monitors.MOST_HOLD_SECONDS
        assert monitors._hold_seconds(parts, parts.endpoint, 7.0) == 7.0

        closing = threading.Thread(target=monitor.close)
        closing.start()
        if not healthy:
            page = ""
            while closing.is_alive() and not re.search(r'run_ended\{.*reason="closed".*\} 1\.0', page):
                page = urllib.request.urlopen(url + "/metrics", timeout=5).read().decode()
            assert closing.is_alive()
        closing.join(30)
        assert not closing.is_alive()


SCRIPT = """
import os, sys, torch, gradexporter
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gradexporter.watch(model, optimizer, host="127.0.0.1", port=0)
def step():
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
step()
{body}
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError('mine')", 1),
        ("os._exit(4)", 4),
        ("del monitor", 0),
        ("import threading; threading.Thread(target=step).start()", 0),
        (
            "pid = os.fork()\n"
            "if pid == 0:\n    step(); monitor.observe(1.0); monitor.flush(); monitor.close(); sys.exit(0)\n"
            "assert os.waitpid(pid, 0)[1] == 0\n"
            "step()\nassert monitor.flush() and monitor.report.step == 2",
            0,
        ),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import signal; signal.raise_signal(signal.SIGINT)", -2),
    ],
)
def test_nothing_hangs_at_exit(body: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=textwrap.dedent(body))], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr
    assert "gradexporter:" not in done.stderr


def test_monitor_without_parts_is_inert() -> None:
    with Monitor() as monitor:
        assert monitor.observe(1.0) == 1.0
        assert monitor.url is None
