"""One optimizer under watch: its parameters, and how they fold into layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from gradexporter import stats
from gradexporter.hooks.layers import Layer
from gradexporter.readback import Number, Pending, Plan
from gradexporter.records import Signature


def held_by(optimizer: Optimizer) -> list[int]:
    """Identities of the parameters that the groups hold now."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _measurable(parameter: nn.Parameter) -> bool:
    valued = parameter.dtype in stats.FLOATING or parameter.is_complex()
    return valued and not parameter.is_meta and bool(parameter.numel())


class Watched:
    """One optimizer: its parameters, how they fold into layers, and the gradient of the step being built."""

    def __init__(self, index: int, optimizer: Optimizer, layers: Sequence[Layer], leftovers: frozenset[int]) -> None:
        self.index = index
        self.optimizer = optimizer
        self._layers = layers
        self._leftovers = leftovers
        self.block: stats.Block | None = None
        """Gradient statistics of the step being built; a later end of backward replaces them."""
        self.positions: tuple[int, ...] = ()
        self.backwards = 0
        """Ends of backward since the last update."""
        self.expected_backwards = 0
        """How many the last update had."""
        self.scaled = True
        self.scale: Tensor | None = None
        self.stepping = False
        """Whether the optimizer's own hooks fired since a scaler announced a step."""
        self.clip: Number | None = None
        self.found_inf: Tensor | None = None
        self.rates: list[Number] = []
        self._arrange()

    def _arrange(self) -> None:
        self.held = held_by(self.optimizer)
        held = set(self.held)
        names: list[str] = []
        indexes: list[int] = []
        owners: list[int] = []
        self.parameters: list[nn.Parameter] = []
        for index, layer in enumerate(self._layers):
            mine = [parameter for parameter in layer.parameters if id(parameter) in held and _measurable(parameter)]
            if mine or index in self._leftovers:
                owners += [len(names)] * len(mine)
                names.append(layer.name)
                indexes.append(index)
                self.parameters += mine
        self.plan = Plan(tuple(names), tuple(indexes), np.array(owners, dtype=np.intp))
        self.everything = tuple(range(len(self.parameters)))
        self._layouts: dict[tuple[int, ...], stats.host.Layout] = {}
        sizes = [parameter.numel() for parameter in self.parameters]
        self.reference = min(range(len(sizes)), key=sizes.__getitem__, default=-1)

    def layout(self, positions: tuple[int, ...]) -> stats.host.Layout:
        """How tensors shaped like these parameters are reduced together."""
        layout = self._layouts.get(positions)
        if layout is None:
            if len(self._layouts) > 16:  # a loop that never touches the same parameters twice
                self._layouts.clear()
            layout = stats.host.Layout([self.parameters[at].shape for at in positions])
            self._layouts[positions] = layout
        return layout

    def measure_gradients(self) -> None:
        """Takes the gradients as they are now."""
        gradients = [parameter.grad for parameter in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            self.positions = self.everything
        else:
            self.positions = tuple(at for at, gradient in enumerate(gradients) if gradient is not None)
        self.block = stats.measure(present, self.layout(self.positions)) if present else None

    def read_again(self) -> None:
        """Takes one gradient as the update will use it, from which the clip factor follows."""
        still_scaled = getattr(self.optimizer, "grad_scale", None) is not None
        gradient = self.parameters[self.reference].grad if self.reference in self.positions else None
        if gradient is not None and not still_scaled:
            self.clip = stats.measure([gradient])[0, 0]

    def signature(self) -> Signature:
        """What must be the same in a run that goes on with this one's baselines."""
        elements = dict.fromkeys(self.plan.layers, 0)
        for owner, parameter in zip(self.plan.owners.tolist(), self.parameters, strict=True):
            elements[self.plan.layers[owner]] += parameter.numel()
        return Signature(kind=type(self.optimizer).__name__, layers=elements)

    def close_state(self, pending: Pending) -> None:
        """Takes parameters and optimizer state after the update into a closing step."""
        pending.blocks["parameters"] = stats.measure(self.parameters, self.layout(self.everything))
        moments = dict(
            zip(("momentum", "second_moment"), stats.state_lists(self.optimizer, self.parameters), strict=True)
        )
        there = {name: [(at, m) for at, m in enumerate(listed) if m is not None] for name, listed in moments.items()}
        pending.moments = {name: tuple(at for at, _ in pairs) for name, pairs in there.items() if pairs}
        for name in pending.moments:
            listed = [moment for _, moment in there[name]]
            pending.blocks[name] = stats.measure(listed, self.layout(pending.moments[name]), norms=False)

    def close_updates(self, pending: Pending) -> bool:
        """Rebuilds the size of the update from the state; False for an optimizer that does not tell."""
        rebuilt = stats.update_norms(self.optimizer, self.parameters)
        if rebuilt is not None:
            pending.updates, pending.blocks["updates"] = rebuilt
        return rebuilt is not None
