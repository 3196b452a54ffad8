"""One optimizer under watch: its parameters, and how they fold into layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from gradexporter import stats
from gradexporter.hooks.layers import Layer
from gradexporter.readback import Number, Plan


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
