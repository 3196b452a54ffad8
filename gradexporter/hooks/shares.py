"""Parameters of which this rank holds a share: which elements, and on how many ranks the same ones lie.

FSDP2 and tensor parallelism make DTensors, FSDP1 flat parameters. All of it is decided when layers are found;
at a step nothing is asked of the wrappers and no collective is issued.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PIPELINE = frozenset({"pp", "pipe", "pipeline", "stage"})
"""Names of mesh dimensions along which ranks hold other layers, not copies of these."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank holds of one parameter."""

    shape: torch.Size
    """Of the local values; without elements where the shard is empty."""
    copies: int
    """Ranks that hold the same values."""
    placements: tuple[Any, ...] | None = None
    """Of a DTensor."""
    start: int = -1
    """Where it begins in a flat parameter; -1 for a parameter of its own."""
    whole: int = 0
    """Elements of that flat parameter on this rank."""

    def known(self, tensor: Tensor) -> bool:
        """Whether a tensor that belongs to the parameter is laid out like it: reduced over ranks, and sharded."""
        if self.placements is not None:
            return tuple(getattr(tensor, "placements", ())) == self.placements
        if self.start >= 0:
            return tensor.numel() == self.whole
        return tensor.shape == self.shape

    def of(self, tensor: Tensor) -> Tensor:
        """This rank's values of a tensor that is laid out like the parameter; a view."""
        tensor = tensor.detach()
        if self.placements is not None:
            tensor = tensor.to_local()  # type: ignore[attr-defined]
            if type(tensor) is not Tensor and hasattr(tensor, "wait"):
                tensor = tensor.wait()  # the result of a collective that is still under way
        return tensor.reshape(-1)[self.start : self.start + self.shape.numel()] if self.start >= 0 else tensor


class Stand:
    """This rank's share of a parameter, its gradient and its optimizer state, as plain tensors."""

    __slots__ = ("grad", "parameter", "state", "values")

    def __init__(self, parameter: nn.Parameter, share: Share, state: Mapping[str, Any]) -> None:
        def local(tensor: Tensor | None) -> Tensor | None:
            return share.of(tensor) if tensor is not None and share.known(tensor) else None

        self.parameter = parameter
        self.values = local(parameter)
        self.grad = local(parameter.grad)
        self.state = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():  # a tensor without dimensions counts steps
                value = local(value)
            if value is not None:
                self.state[name] = value

    def detach(self) -> Tensor | None:
        """The values of the parameter."""
        return self.values


class Held(NamedTuple):
    """A parameter of a module as the optimizer holds it."""

    key: tuple[int, int]
    """The same for a shared parameter wherever it appears."""
    parameter: nn.Parameter
    share: Share | None
    """None in a model that no wrapper has spread."""


class Sharding:
    """How a model is spread over ranks."""

    def __init__(self) -> None:
        self.partial = False
        """Whether any parameter lies on this rank in part only, so that norms are those of a share."""
        self.accumulators: dict[int, nn.Parameter] = {}
        """What autograd accumulates into in place of a parameter that is a view."""
        self.offloaded: set[int] = set()
        """Parameters whose gradients go to main memory behind the backward: FSDP2 waits for those that have a hook."""
        self.sharded: dict[tuple[int, str], nn.Parameter] = {}
        """What the optimizer holds, by module and name, where the module may show a gathered parameter."""
        self._held: dict[int, list[Held]] = {}
        self._flats: set[int] = set()
        self._replicas = 1
        self._everyone = 1

    def of(self, module: nn.Module) -> Iterator[Held]:
        """The parameters that ``module`` owns directly, whatever state its wrapper is in."""
        yield from self._held.get(id(module), ())
        known = {held.key[0] for held in self._held.get(id(module), ())}
        for name, parameter in module._parameters.items():
            parameter = self.sharded.get((id(module), name), parameter)
            if parameter is not None and id(parameter) not in self._flats and id(parameter) not in known:
                yield Held((id(parameter), 0), parameter, self.share(parameter))

    def share(self, parameter: nn.Parameter) -> Share:
        """What this rank holds of a parameter that stands for itself."""
        if not _distributed(parameter):
            return Share(parameter.shape, self._everyone)
        return Share(
            parameter.detach().to_local().shape,  # type: ignore[attr-defined]
            _copies(parameter, self._replicas),
            tuple(parameter.placements),  # type: ignore[attr-defined]
        )

    def add_flat(self, unit: Any) -> bool:
        """Takes in a unit of FSDP1; False if it has no parameters."""
        handle = getattr(unit, "_handle", None)
        if handle is None:
            return False
        flat, sharded = handle.flat_param, bool(handle.uses_sharded_strategy)
        between: Any = getattr(unit, "_inter_node_pg", None)
        ranks: int = unit.process_group.size()
        hybrid = between is not None and "HYBRID" in handle._sharding_strategy.name
        copies: int = ranks if not sharded else between.size() if hybrid else 1
        self.partial |= sharded and ranks > 1
        self._everyone = max(self._everyone, ranks * copies if sharded else ranks)
        self._flats.add(id(flat))
        own = getattr(flat, "_params", None)  # use_orig_params: views, one a parameter
        listed: dict[tuple[int, str], Held] = {}
        for at, (info, place) in enumerate(zip(flat._param_infos, flat._shard_param_infos, strict=True)):
            size = torch.Size([place.numel_in_shard or 0])
            if own is not None:
                self.accumulators[id(own[at])] = flat
                share = Share(size if sharded else flat._shapes[at], copies)
                held = Held((id(own[at]), 0), own[at], share)
            else:
                whole = flat._sharded_size.numel()
                share = Share(size, copies, start=place.offset_in_shard or 0, whole=whole)
                held = Held((id(flat), at), flat, share)
            listed[id(info.module), info.param_name] = held
            self._held.setdefault(id(info.module), []).append(held)
        for info in flat._shared_param_infos:
            held = listed[id(info.prim_module), info.prim_param_name]
            self._held.setdefault(id(info.module), []).append(held)
        return True

    def add_sharded(self, module: Any) -> None:
        """Takes in a module of FSDP2, which may show gathered parameters at the moment."""
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            info = parameter._module_info
            places = [
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ]
            if parameter.offload_to_cpu and parameter.pin_memory:
                self.offloaded.add(id(parameter.sharded_param))
            self.sharded.update({(id(place), name): parameter.sharded_param for place, name in places})

    def add_copies(self, replicas: int) -> None:
        """Takes in a data parallel wrapper around the model or a part of it."""
        self._replicas = max(self._replicas, replicas)

    def add_distributed(self, parameter: Any) -> None:
        """Takes in a DTensor."""
        spread = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        self.partial |= any(size > 1 and not placement.is_replicate() for size, placement in spread)
        ranks = parameter.device_mesh.size() * max(_outside(parameter.device_mesh), self._replicas)
        self._everyone = max(self._everyone, ranks)


def find_sharding(model: nn.Module) -> Sharding | None:
    """How wrappers have spread ``model`` over ranks; None for a model that lies here whole in plain tensors."""
    sharding, spread = Sharding(), False
    modules = list(model.modules())
    for module in modules:
        names = {cls.__name__ for cls in type(module).__mro__}
        if "DistributedDataParallel" in names:
            sharding.add_copies(getattr(module, "process_group").size())  # noqa: B009
        elif "FullyShardedDataParallel" in names:
            spread |= sharding.add_flat(module)
        elif "FSDPModule" in names:
            sharding.add_sharded(module)
    shown = [parameter for module in modules for parameter in module._parameters.values()]
    for parameter in (*sharding.sharded.values(), *shown):
        if parameter is not None and _distributed(parameter):
            sharding.add_distributed(parameter)
            spread = True
    return sharding if spread else None


def optimized_by(model: nn.Module) -> set[int]:
    """Identities of the parameters of ``model`` as an optimizer holds them."""
    sharding = find_sharding(model)
    if sharding is None:
        return {id(parameter) for parameter in model.parameters()}
    return {id(held.parameter) for module in model.modules() for held in sharding.of(module)}


def _distributed(parameter: Tensor) -> bool:
    return type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh")


def _copies(parameter: Any, replicas: int) -> int:
    mesh = parameter.device_mesh
    spread = zip(mesh.shape, parameter.placements, strict=True)
    same: int = math.prod(size for size, placement in spread if placement.is_replicate())
    return same * max(_outside(mesh), replicas)


def _outside(mesh: Any) -> int:
    """Times that a mesh fits into the one that it was cut from, stages of a pipeline left aside."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    else:  # torch before 2.8
        root = sys.modules["torch.distributed.device_mesh"]._mesh_resources.get_root_mesh(mesh)
    if root is mesh:
        return 1
    stages = zip(root.mesh_dim_names or (), root.shape, strict=False)
    ranks: int = math.prod(size for name, size in stages if name not in _PIPELINE)
    times: int = ranks // mesh.size()
    return max(1, times)
