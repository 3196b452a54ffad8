"""Many architectures on two processes, data parallel and sharded: measured right, and trained as alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed.harness import Ranks
from tests.zoo.specimen import Specimen
from tests.zoo.trials import right, same, train
from tests.zoo.wraps import parallel, sharded
from tests.zoo.zoo import DISTINCT, FATAL_SHARDED, SPECIMENS, UNPARALLEL, UNSHARDABLE

WRAPS = {"parallel": (parallel, UNPARALLEL), "sharded": (sharded, UNSHARDABLE)}


def check(kind: str, name: str) -> None:
    """Asserts in each rank, with batches of its own, what must hold there."""
    (wrap, impossible), specimen, rank = WRAPS[kind], SPECIMENS[name], dist.get_rank()
    if name in impossible:
        with pytest.raises((RuntimeError, AssertionError)):
            train(specimen, wrap, seed=rank)
        return
    alone = train(specimen, wrap, seed=rank)
    watched = train(specimen, wrap, watched=True, seed=rank)
    witnessed = train(specimen, witnessed=True, seed=rank)

    same(watched, alone)
    right(watched, alone)  # the gradient that the wrapper leaves: reduced, of this rank's share
    right(watched, witnessed, steps=(0,), columns="activation")
    assert watched.said <= alone.said
    assert all(watched.signals[signal] for signal in ("gradient", "pre_clip", "activation", "loss"))


@pytest.mark.parametrize("name", DISTINCT)
def test_data_parallel_models_are_measured_on_each_rank(name: str, two_ranks: Ranks) -> None:
    two_ranks.run(check, "parallel", name)


@pytest.mark.slow
@pytest.mark.parametrize("specimen", [one for one in SPECIMENS.values() if one.name not in DISTINCT], ids=str)
def test_all_data_parallel_models_are_measured_on_each_rank(specimen: Specimen, two_ranks: Ranks) -> None:
    two_ranks.run(check, "parallel", specimen.name)


@pytest.mark.slow
@pytest.mark.parametrize("specimen", [one for one in SPECIMENS.values() if one.name not in FATAL_SHARDED], ids=str)
def test_sharded_models_are_measured_on_each_rank(specimen: Specimen, two_ranks: Ranks) -> None:
    two_ranks.run(check, "sharded", specimen.name)
