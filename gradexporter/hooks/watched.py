"""One optimizer under watch: its parameters, and how they fold into layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from gradexporter import stats
from gradexporter.hooks.layers import Layer
from gradexporter.hooks.optimizers import ByHand, Steps, announcers, announces, state_of
from gradexporter.hooks.shares import Sharding, Share, Stand
from gradexporter.hooks.unannounced import Changes
from gradexporter.readback import Number, Pending, Plan
from gradexporter.records import Signature

if TYPE_CHECKING:
    from gradexporter.hooks.points import Accumulated


def held_by(optimizer: Any) -> list[int]:
    """Identities of the parameters that the groups hold now."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _measurable(parameter: nn.Parameter) -> bool:
    valued = parameter.dtype in stats.FLOATING or parameter.is_complex()
    return valued and not parameter.is_meta


class Watched:
    """One optimizer: its parameters, how they fold into layers, and the gradient of the step being built."""

    def __init__(
        self,
        index: int,
        optimizer: Any,
        layers: Sequence[Layer],
        leftovers: frozenset[int],
        sharding: Sharding | None = None,
    ) -> None:
        self.index = index
        self.optimizer = optimizer
        self.steps = Steps()
        self.accumulated: Accumulated | None = None
        """The hook on its parameters."""
        self.unhooked: list[nn.Parameter] = []
        """Parameters that took no gradient when hooks were set."""
        self.parts: dict[int, stats.Block] = {}
        """Gradients that were measured one by one, by position, for an update inside the backward clears them."""
        self.stepped = False
        """Whether a step that is only part of an update was applied since the last update."""
        self._state = state_of(optimizer)
        self._layers = layers
        self._leftovers = leftovers
        self._partial = sharding is not None and sharding.partial
        self._accumulators = {} if sharding is None else sharding.accumulators
        self.block: stats.Block | None = None
        """Gradient statistics of the step being built; a later end of backward replaces them."""
        self.positions: tuple[int, ...] = ()
        self.unknown: tuple[int, ...] = ()
        """Positions of parameters whose gradient is not what the update uses: not reduced over ranks yet."""
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
        self.changes = Changes(self.parameters) if isinstance(optimizer, ByHand) else None

    @property
    def announced(self) -> bool:
        """Whether the end of an update is told by its optimizer's hooks, and need not be looked for."""
        return announces(self.optimizer)

    def is_updated_by(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` is this one, one that it wraps, or what the user passed for it."""
        one = self.optimizer
        return (
            one is optimizer or optimizer in announcers(one) or (isinstance(one, ByHand) and one.stands_for(optimizer))
        )

    def _arrange(self) -> None:
        self.held = held_by(self.optimizer)
        held = set(self.held)
        names: list[str] = []
        indexes: list[int] = []
        owners: list[int] = []
        self.parameters: list[nn.Parameter] = []
        self._shares: list[Share] = []
        for index, layer in enumerate(self._layers):
            shares = layer.shares or (None,) * len(layer.parameters)
            mine = [
                (parameter, share)
                for parameter, share in zip(layer.parameters, shares, strict=True)
                if id(parameter) in held and _measurable(parameter)
            ]
            there = [pair for pair in mine if (pair[1] or pair[0]).shape.numel()]
            # A layer whose shard is empty here is one all the same: ranks agree on the layers.
            if there or index in self._leftovers or any(share is not None for _, share in mine):
                owners += [len(names)] * len(there)
                names.append(layer.name)
                indexes.append(index)
                self.parameters += [parameter for parameter, _ in there]
                self._shares += [share for _, share in there if share is not None]
        copies = np.array([share.copies for share in self._shares], dtype=np.float64) if self._partial else None
        self.plan = Plan(tuple(names), tuple(indexes), np.array(owners, dtype=np.intp), copies)
        self.everything = tuple(range(len(self.parameters)))
        self._shapes = [share.shape for share in self._shares] or [parameter.shape for parameter in self.parameters]
        self.places = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        self._layouts: dict[tuple[int, ...], stats.host.Layout] = {}
        sizes = [shape.numel() for shape in self._shapes]
        self.reference = min(range(len(sizes)), key=sizes.__getitem__, default=-1)

    def layout(self, positions: tuple[int, ...]) -> stats.host.Layout:
        """How tensors shaped like these parameters are reduced together."""
        layout = self._layouts.get(positions)
        if layout is None:
            if len(self._layouts) > 16:  # a loop that never touches the same parameters twice
                self._layouts.clear()
            layout = stats.host.Layout([self._shapes[at] for at in positions])
            self._layouts[positions] = layout
        return layout

    @property
    def accumulators(self) -> list[nn.Parameter]:
        """What autograd accumulates the gradients into; where parameters are views, the one that they are views of."""
        into = [self._accumulators.get(id(parameter), parameter) for parameter in self.parameters]
        return list({id(parameter): parameter for parameter in into}.values())

    def measure_gradients(self) -> None:
        """Takes the gradients as they are now."""
        gradients: Sequence[Tensor | None] = [parameter.grad for parameter in self.parameters]
        if self._shares:
            gradients = self._local_gradients(gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            self.positions = self.everything
        else:
            self.positions = tuple(at for at, gradient in enumerate(gradients) if gradient is not None)
        self.block = stats.measure(present, self.layout(self.positions)) if present else None

    def _local_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """This rank's values of gradients that are reduced over ranks; the others are unknown."""
        known = [
            gradient is None or share.known(gradient) for gradient, share in zip(gradients, self._shares, strict=True)
        ]
        self.unknown = tuple(at for at, there in enumerate(known) if not there)
        return [
            share.of(gradient) if gradient is not None and there else None
            for gradient, share, there in zip(gradients, self._shares, known, strict=True)
        ]

    def _local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """This rank's values of what is kept for each parameter; None while a wrapper shows something else."""
        if not self._shares:
            return tensors
        pairs = list(zip(tensors, self._shares, strict=True))
        return [share.of(tensor) for tensor, share in pairs] if all(s.known(t) for t, s in pairs) else None

    def measure_one_by_one(self, parameters: Sequence[Tensor]) -> None:
        """Takes the gradients of these parameters now: before the backward ends they will be gone."""
        for parameter in parameters:
            at = self.places.get(id(parameter))
            gradient = parameter.grad
            if at is None or at in self.parts or gradient is None:
                continue
            if not self._shares:
                self.parts[at] = stats.measure([gradient])
            elif self._shares[at].known(gradient):
                self.parts[at] = stats.measure([self._shares[at].of(gradient)])

    def join_parts(self) -> None:
        """Makes the gradients that were taken one by one those of the step being built."""
        self.positions = tuple(self.parts)
        self.block = stats.side_by_side(list(self.parts.values())) if self.parts else None

    def forget_step(self) -> None:
        """Starts the next step afresh."""
        self.block, self.scale, self.clip, self.found_inf = None, None, None, None
        self.parts, self.stepped = {}, False
        self.backwards = 0
        if self.changes is not None:
            self.changes.settle()

    def read_again(self) -> None:
        """Takes one gradient as the update will use it, from which the clip factor follows."""
        still_scaled = getattr(self.optimizer, "grad_scale", None) is not None
        gradient = self.parameters[self.reference].grad if self.reference in self.positions else None
        if gradient is not None and not still_scaled:
            if self._shares:
                gradient = self._shares[self.reference].of(gradient)
            self.clip = stats.measure([gradient])[0, 0]

    def signature(self) -> Signature:
        """What must be the same in a run that goes on with this one's baselines."""
        elements = dict.fromkeys(self.plan.layers, 0)
        for owner, shape in zip(self.plan.owners.tolist(), self._shapes, strict=True):
            elements[self.plan.layers[owner]] += shape.numel()
        return Signature(kind=type(self.optimizer).__name__, layers=elements)

    def close_state(self, pending: Pending) -> None:
        """Takes parameters and optimizer state after the update into a closing step."""
        parameters = self._local(self.parameters)
        if parameters is None:
            return
        pending.blocks["parameters"] = stats.measure(parameters, self.layout(self.everything))
        lists = stats.state_lists(self._state, self.parameters)
        if self._shares:
            lists = (self._local_moments(lists[0]), self._local_moments(lists[1]))
        moments = dict(zip(("momentum", "second_moment"), lists, strict=True))
        there = {name: [(at, m) for at, m in enumerate(listed) if m is not None] for name, listed in moments.items()}
        pending.moments = {name: tuple(at for at, _ in pairs) for name, pairs in there.items() if pairs}
        for name in pending.moments:
            listed = [moment for _, moment in there[name]]
            pending.blocks[name] = stats.measure(listed, self.layout(pending.moments[name]), norms=False)

    def _local_moments(self, moments: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = zip(moments, self._shares, strict=True)
        return [share.of(moment) if moment is not None and share.known(moment) else None for moment, share in pairs]

    def close_updates(self, pending: Pending) -> bool:
        """Rebuilds the size of the update from the state; False for an optimizer that does not tell."""
        if self._shares:
            rebuilt = self._share_updates()
        else:
            rebuilt = stats.update_norms(self.optimizer, self.parameters)
        if rebuilt is not None:
            pending.updates, pending.blocks["updates"] = rebuilt
        return rebuilt is not None

    def _share_updates(self) -> tuple[tuple[int, ...], stats.Block] | None:
        stands = [
            Stand(parameter, share, self.optimizer.state.get(parameter, {}))
            for parameter, share in zip(self.parameters, self._shares, strict=True)
        ]
        groups = []
        for group in self.optimizer.param_groups:
            members = {id(parameter) for parameter in group["params"]}
            groups.append({**group, "params": [stand for stand in stands if id(stand.parameter) in members]})
        return stats.rebuilt_norms(type(self.optimizer), {s: s.state for s in stands}, groups, stands)
