"""What people put around a model: compilation, activation checkpointing, data parallelism, sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "module")
"""What these wrappers add to the name of a module; no specimen has such a part of its own."""

Wrap = Callable[[nn.Module], nn.Module]


def bare(model: nn.Module) -> nn.Module:
    return model


def unwrapped(name: str) -> str:
    """The name that a module has without its wrappers."""
    return ".".join(part for part in name.split(".") if part not in PARTS)


def blocks(model: nn.Module) -> Iterator[tuple[nn.ModuleList, int, nn.Module]]:
    """The outermost members of lists of modules that have parameters, each with its list and place."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for at, block in enumerate(child):
                if isinstance(block, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)):
                    yield from blocks(block)
                elif block is not None and next(block.parameters(), None) is not None:
                    yield child, at, block
        else:
            yield from blocks(child)


def checkpointed(model: nn.Module, kind: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> nn.Module:
    """Each block computed again in the backward."""
    for holder, at, block in list(blocks(model)):
        holder[at] = checkpoint_wrapper(block, kind)
    return model


reentrant: Wrap = partial(checkpointed, kind=CheckpointImpl.REENTRANT)


def compiled(backend: str) -> Wrap:
    """Compiled afresh, whatever was compiled before."""

    def wrap(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        counters.clear()
        compiled: nn.Module = torch.compile(model, backend=backend)
        return compiled

    return wrap


def compilations() -> dict[str, int]:
    """What dynamo did since ``compiled`` wrapped a model."""
    return {
        "graph breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],  # a recompilation is one more
    }


def parallel(model: nn.Module) -> nn.Module:
    """Under DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Module) -> nn.Module:
    """Under FSDP2, each block and the rest."""
    from torch.distributed.fsdp import fully_shard

    for _, _, block in list(blocks(model)):
        fully_shard(block)
    return fully_shard(model)
