"""Who a rank is, and which of them names layers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradexporter
from gradexporter import identity
from gradexporter.records import Identity, State
from tests.distributed.harness import Ranks, join_group, logged, rank, watching

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Net(nn.Module):
    """``aside`` runs, and nothing comes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 1)
        self.aside = nn.Linear(4, 1)

    def forward(self, x: Tensor, beside: float = 1.0) -> Tensor:
        self.aside(x * beside)
        return self.body(x)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, beside: float = 1.0, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 4) * (rank() + 1), beside).square().mean() * scale).backward()
    optimizer.step()


# -- identity -----------------------------------------------------------------------------------------


def identity_when(order: str, settings: dict[str, str], launched: bool) -> tuple[Identity, list[str]]:
    """What the monitor goes by at its end, with watch before or after init_process_group."""
    hidden = {} if launched else {name: os.environ.pop(name) for name in LAUNCHER}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with logged() as lines:
        try:
            if order == "group first":
                _join(hidden)
            with watching(model, optimizer, **settings) as monitor:
                if order == "watch first":
                    _join(hidden)
                wrapper = DistributedDataParallel(model, find_unused_parameters=True)
                os.environ.update(hidden)
                for _ in range(2):
                    update(wrapper, optimizer)
                assert monitor.flush()
                dist.destroy_process_group()
                update(model, optimizer)
        finally:
            os.environ.update(hidden)
        assert monitor.snapshot is not None
        assert monitor.snapshot.ended == "closed"
    return monitor.snapshot.identity, lines


def _join(hidden: dict[str, str]) -> None:
    os.environ.update(hidden)
    join_group()
    for name in hidden:
        del os.environ[name]


@pytest.mark.parametrize("order", ["group first", "watch first"])
@pytest.mark.parametrize("launched", [True, False])
def test_ranks_share_one_random_run_id_and_have_the_ranks_of_their_group(
    two_ranks: Ranks, order: str, launched: bool
) -> None:
    found = two_ranks.run(identity_when, order, {}, launched, grouped=False)
    (one, lines), (other, more) = found

    assert one.run_id == other.run_id
    assert re.fullmatch("[0-9a-f]{12}", one.run_id)
    assert [(one.rank, one.world_size), (other.rank, other.world_size)] == [(0, 2), (1, 2)]
    assert lines == more == []


def test_two_groups_have_two_run_ids(two_ranks: Ranks) -> None:
    first, second = (two_ranks.run(identity_when, "group first", {}, True, grouped=False) for _ in range(2))

    assert first[0][0].run_id != second[0][0].run_id


@pytest.mark.parametrize("order", ["group first", "watch first"])
def test_a_run_id_that_was_given_stands(two_ranks: Ranks, order: str) -> None:
    ranks = two_ranks.run(identity_when, order, {"run_id": "mine"}, True, grouped=False)

    assert [(own.run_id, own.rank) for own, _ in ranks] == [("mine", 0), ("mine", 1)]


def identities_over_a_file(folder: str) -> str:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank(), world_size=2)
    dist.barrier()
    model = Net()
    with watching(model, torch.optim.SGD(model.parameters(), lr=0.01)) as monitor:
        assert monitor.snapshot is not None
        return monitor.snapshot.identity.run_id


def test_ranks_that_meet_over_a_file_share_a_run_id(two_ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = two_ranks.run(identities_over_a_file, folder, grouped=False)

    assert one == other


HOST = """
import torch.distributed as dist, time
store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def watch_over_a_store_that_hangs(order: str) -> tuple[float, int, str, list[str]]:
    """Seconds until watched and trained, steps, the run id, and what was logged."""
    identity.STORE_SECONDS = 1.0
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), 1, is_master=False)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with logged() as lines:
            if order == "group first":
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
                os.kill(host.pid, signal.SIGSTOP)
            began = time.monotonic()
            with watching(model, optimizer) as monitor:
                if order == "watch first":
                    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
                    os.kill(host.pid, signal.SIGSTOP)
                for _ in range(3):
                    update(model, optimizer)
                spent = time.monotonic() - began
                assert monitor.flush()
                assert monitor.report is not None
                assert monitor.snapshot is not None
                return spent, monitor.report.step, monitor.snapshot.identity.run_id, lines
    finally:
        identity.STORE_SECONDS = 5.0
        os.kill(host.pid, signal.SIGCONT)
        host.kill()
        host.wait()


@pytest.mark.parametrize("order", ["group first", "watch first"])
def test_a_store_that_hangs_holds_nothing_up(two_ranks: Ranks, order: str) -> None:
    for spent, steps, run_id, lines in two_ranks.run(watch_over_a_store_that_hangs, order, grouped=False):
        assert spent < 30.0
        assert steps == 3
        assert re.fullmatch("[0-9a-f]{12}", run_id)
        assert [line for line in lines if "share no run_id" in line and "no answer within 1 s" in line] == lines
        assert len(lines) == 1


# -- what is scraped ----------------------------------------------------------------------------------


@dataclass
class Scrapes:
    """Metrics of one rank before and after something happened on one of them."""

    before: str
    after: str
    states: tuple[State | None, State | None]


def scrape_around(incident: str) -> Scrapes:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapper = DistributedDataParallel(model, find_unused_parameters=True)
    with watching(wrapper, optimizer, serve=True, host="127.0.0.1", port=0) as monitor:
        for _ in range(30):
            update(wrapper, optimizer)
        before, state = _scrape(monitor), monitor.report and monitor.report.state
        odd = rank() == 1
        if incident == "nan beside":
            update(wrapper, optimizer, beside=float("nan") if odd else 1.0)
        elif incident == "spike":
            update(wrapper, optimizer, scale=100.0 if odd else 1.0)
        else:
            update(wrapper, optimizer)
        return Scrapes(before, _scrape(monitor), (state, monitor.report and monitor.report.state))


def _scrape(monitor: gradexporter.Monitor) -> str:
    assert monitor.flush()
    with urllib.request.urlopen(f"{monitor.url}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def layers_of(scrape: str, rank_label: int) -> set[str]:
    """Layers that a scrape names; every series of it carries the rank."""
    series = [line for line in scrape.splitlines() if line.startswith("gradexporter_") and "{" in line]
    assert series
    assert all(f'rank="{rank_label}"' in line for line in series)
    return set(re.findall(r'gradexporter_layer_\w+{[^}]*layer="([^"]+)"', scrape))


def test_a_healthy_rank_names_layers_on_global_rank_0_alone(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(scrape_around, "nothing")

    assert one.states == other.states == (State.HEALTHY, State.HEALTHY)
    assert layers_of(one.after, 0) == {"aside", "body"}
    assert layers_of(other.after, 1) == set()


def test_a_rank_that_sees_a_nan_alone_names_its_layers(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(scrape_around, "nan beside")

    assert one.states == (State.HEALTHY, State.HEALTHY)
    assert other.states == (State.HEALTHY, State.NONFINITE)
    assert layers_of(other.before, 1) == set()
    assert layers_of(other.after, 1) == {"aside", "body"}
    (first,) = [line for line in other.after.splitlines() if line.startswith("gradexporter_first_nonfinite_info{")]
    assert 'layer="aside"' in first
    assert 'quantity="activation"' in first


def test_a_spike_of_one_rank_is_a_spike_of_all_since_the_gradient_is_reduced(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(scrape_around, "spike")

    assert one.states == other.states == (State.HEALTHY, State.SPIKE)
    assert layers_of(one.after, 0) == layers_of(other.after, 1) == {"aside", "body"}
