"""Which modules are layers, and under which name.

A layer is a module that owns a parameter directly. Its name is the module's qualified name without the
parts that wrappers add, so that it is the same bare, compiled, under data parallelism, sharded and
checkpointed. A shared parameter belongs to the first layer that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from gradexporter.hooks.shares import Held, Sharding, Share
from gradexporter.records import ROOT_LAYER

OTHER = "(other)"
"""Name of the parameters that an optimizer updates and the watched module does not own."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS_BY_MODULE = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "AveragedModel"}
)
"""Classes whose child ``module`` is the user's model; elsewhere ``module`` is a name like any other."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its name, its module, and the parameters that it owns first."""

    name: str
    module: nn.Module | None
    """None for parameters that an optimizer holds and no module of the model owns."""
    parameters: tuple[nn.Parameter, ...]
    """As the optimizer holds them; a flat one once for each parameter in it."""
    shares: tuple[Share | None, ...] = ()
    """What this rank holds of each; None where it is all there is."""


def find_layers(
    model: nn.Module,
    optimized: Sequence[nn.Parameter] = (),
    sharding: Sharding | None = None,
    *,
    parameterless: bool = False,
) -> list[Layer]:
    """The layers of a model in the order of its modules; parameterless leaves too when asked for.

    What is ``optimized`` and belongs to no module of the model makes one last layer, ``(other)``.
    """
    owned: set[tuple[int, int]] = set()
    layers = []
    for name, module in _walk(model, "", set()):
        direct = list(_direct(module) if sharding is None else sharding.of(module))
        leaf = parameterless and not direct and next(module.children(), None) is None
        if not direct and not leaf:
            continue
        fresh = {held.key: held for held in direct if held.key not in owned}
        owned.update(fresh)
        layers.append(Layer(name or ROOT_LAYER, module, *_columns(list(fresh.values()))))
    inside = {identity for identity, _ in owned}
    foreign = {id(parameter): parameter for parameter in optimized if id(parameter) not in inside}.values()
    if foreign:
        share = (lambda parameter: None) if sharding is None else sharding.share
        held = [Held((id(parameter), 0), parameter, share(parameter)) for parameter in foreign]
        layers.append(Layer(OTHER, None, *_columns(held)))
    return layers


def _direct(module: nn.Module) -> Iterator[Held]:
    for parameter in module._parameters.values():
        if parameter is not None:
            yield Held((id(parameter), 0), parameter, None)


def _columns(held: Sequence[Held]) -> tuple[tuple[nn.Parameter, ...], tuple[Share | None, ...]]:
    return tuple(each.parameter for each in held), tuple(each.share for each in held)


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for part, child in module._modules.items():
        if child is None:
            continue
        wrapped = part in _WRAPPER_PARTS or (part == "module" and _wraps(module))
        yield from _walk(child, prefix if wrapped else f"{prefix}.{part}" if prefix else part, seen)


def _wraps(module: nn.Module) -> bool:
    return any(cls.__name__ in _WRAPPERS_BY_MODULE for cls in type(module).__mro__)


def without_data_parallel(model: nn.Module) -> nn.Module:
    """The module that a ``DistributedDataParallel`` runs; a hook on the wrapper itself would cost a graph break."""
    while any(cls.__name__ == "DistributedDataParallel" for cls in type(model).__mro__):
        model = cast(nn.Module, model.module)
    return model
