"""Which modules are layers, and under which name.

A layer is a module that owns a parameter directly. Its name is the module's qualified name without the
parts that wrappers add, so that it is the same bare, compiled, under data parallelism, sharded and
checkpointed. A shared parameter belongs to the first layer that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

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


def find_layers(
    model: nn.Module, optimized: Sequence[nn.Parameter] = (), *, parameterless: bool = False
) -> list[Layer]:
    """The layers of a model in the order of its modules; parameterless leaves too when asked for.

    What is ``optimized`` and belongs to no module of the model makes one last layer, ``(other)``.
    """
    owned: set[int] = set()
    layers = []
    for name, module in _walk(model, "", set()):
        direct = [parameter for parameter in module._parameters.values() if parameter is not None]
        leaf = parameterless and not direct and next(module.children(), None) is None
        if not direct and not leaf:
            continue
        fresh = tuple(parameter for parameter in direct if id(parameter) not in owned)
        owned.update(id(parameter) for parameter in fresh)
        layers.append(Layer(name or ROOT_LAYER, module, fresh))
    foreign = tuple({id(parameter): parameter for parameter in optimized if id(parameter) not in owned}.values())
    return [*layers, Layer(OTHER, None, foreign)] if foreign else layers


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
