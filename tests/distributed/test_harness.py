"""A group of processes answers, and what goes wrong in it is a failed test and never a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import RankError, Ranks, join_group, rank


def total(start: float) -> tuple[float, Tensor]:
    tensor = torch.full((1,), start + rank())
    dist.all_reduce(tensor)
    return tensor.item(), tensor


def raises_on_one() -> None:
    if rank() == 1:
        raise ValueError("the batch is odd")
    dist.barrier()


def dies_on_one() -> None:
    if rank() == 1:
        os._exit(7)
    dist.barrier()


def hangs_on_one() -> None:
    if rank() == 1:
        time.sleep(600)


def unpicklable() -> Any:
    return lambda: None


def own_group() -> tuple[bool, int, int]:
    before = dist.is_initialized()
    join_group()
    return before, dist.get_rank(), dist.get_world_size()


def process_id() -> int:
    return os.getpid()


def test_every_rank_returns_what_it_has(two_ranks: Ranks) -> None:
    assert [(3.0, torch.tensor([3.0])), (3.0, torch.tensor([3.0]))] == two_ranks.run(total, 1.0)


def test_processes_are_used_again(two_ranks: Ranks) -> None:
    assert two_ranks.run(process_id) == two_ranks.run(process_id)


def test_a_check_may_make_its_own_group(two_ranks: Ranks) -> None:
    assert two_ranks.run(own_group, grouped=False) == [(False, 0, 2), (False, 1, 2)]
    assert [result for result, _ in two_ranks.run(total, 0.0)] == [1.0, 1.0]


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("check", "timeout", "says"),
    [
        (raises_on_one, 60.0, "ValueError: the batch is odd"),
        (dies_on_one, 60.0, "rank 1: died with exit code 7"),
        (hangs_on_one, 3.0, "line .* in hangs_on_one"),
        (unpicklable, 60.0, "pickle"),
    ],
)
def test_a_rank_that_fails_is_a_failed_test_and_the_next_check_runs(
    fragile: Ranks, monkeypatch: pytest.MonkeyPatch, check: Any, timeout: float, says: str
) -> None:
    monkeypatch.setattr("tests.distributed.harness.GRACE_SECONDS", 1.0)
    before = fragile.run(process_id)

    with pytest.raises(RankError, match=says):
        fragile.run(check, timeout=timeout)

    assert not any(Path(f"/proc/{process}").exists() for process in before)
    assert [result for result, _ in fragile.run(total, 0.0)] == [1.0, 1.0]
