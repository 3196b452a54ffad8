"""One optimizer under watch: its parameters, and how they fold into layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gradexporter import stats
from gradexporter.hooks.layers import Layer
from gradexporter.hooks.optimizers import ByHand, Steps, announcers, announces, state_of
from gradexporter.hooks.partitions import Partitioned
from gradexporter.hooks.shares import Sharding, Share, Stand
from gradexporter.hooks.unannounced import Changes
from gradexporter.readback import Indexes, Number, Pending, Plan
from gradexporter.records import Signature, Values
from gradexporter.reread import Reread

if TYPE_CHECKING:
    from gradexporter.hooks.points import Accumulated


def held_by(optimizer: Any) -> list[int]:
    """Identities of the parameters that the groups hold now."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _measurable(parameter: nn.Parameter) -> bool:
    valued = parameter.dtype in stats.FLOATING or parameter.is_complex()
    return valued and not parameter.is_meta


_SMALLEST_NORM = 1e-18
"""Norm in float32 below which squares have underflowed, or everything is zero."""

LONG = 100
"""Backwards without an update after which somebody else's updates are looked for."""


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
        self.keeper = state_of(optimizer)
        """Where the state of its parameters lies."""
        self._layers = layers
        self._leftovers = leftovers
        self._partial = sharding is not None and sharding.partial
        self._accumulators = {} if sharding is None else sharding.accumulators
        self._offloaded = frozenset[int]() if sharding is None else frozenset(sharding.offloaded)
        self.block: stats.Block | None = None
        """Gradient statistics of the step being built; a later end of backward replaces them."""
        self.positions: tuple[int, ...] = ()
        self.unknown: tuple[int, ...] = ()
        """Positions of parameters whose gradient is not what the update uses: not reduced over ranks yet."""
        self.backwards = 0
        """Ends of backward since the last update."""
        self.expected_backwards = 0
        """How many the last update had."""
        self.early: set[int] = set()
        """Numbers of backwards that were too few, when the gradient was changed before it was measured."""
        self._versions: list[int] = []
        self.clip_comes = False
        """Whether our clip is expected to bring the norms: it did before the last update."""
        self.clip_came = False
        """Whether it has brought them, or could have, since the last end of backward."""
        self.probe: bool | None = None
        """Whether the next clip is held against the gradients that the backward left, since something had changed them
        before it; None before that happened, False after."""
        self._version = 0
        """Changes in place of the first parameter until the first backward after the last update."""
        self.before_clipping = True
        """Whether the gradients were measured before anybody could have clipped them."""
        self.closure = False
        """Whether the update evaluates a closure, with the backward in it."""
        self.scaled = True
        self.scale: Tensor | None = None
        self.stepping = False
        """Whether the optimizer's own hooks fired since a scaler announced a step."""
        self.again: stats.Block | None = None
        """Statistics of the gradients that were read again before the update."""
        self.references: tuple[int, ...] = ()
        self.still_scaled = False
        self.found_inf: Tensor | None = None
        self.rates: list[Number] = []
        self._rebuilt: tuple[tuple[int, ...], stats.Block] | None = None
        """Updates that a pass over the whole state has told already."""
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
        self.reread = Reread([shape.numel() for shape in self._shapes], self._rounding())
        self.harvests = not self._shares and all(parameter.device.type == "cpu" for parameter in self.parameters)
        """Whether norms that a clip computes are those of these parameters, and may be looked at."""
        self._clip: tuple[list[int], tuple[int, ...], Indexes | None] = ([], (), None)

    def _rounding(self) -> float:
        """How far, relatively, gradients that were multiplied alike may seem to differ."""
        dtypes = {parameter.dtype for parameter in self.parameters}
        known = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_complex or dtype in stats.ORDINARY_DTYPES]
        return max([1e-3, *(4 * eps for eps in known)]) if len(known) == len(dtypes) else 0.5

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
        """What autograd accumulates the gradients into; where parameters are views, the one that they are views of.

        One alone of those whose gradients leave the device behind the backward: each with a hook is waited for.
        """
        if isinstance(self.optimizer, Partitioned):
            return []
        into = [self._accumulators.get(id(parameter), parameter) for parameter in self.parameters]
        leaving = [parameter for parameter in into if id(parameter) in self._offloaded and parameter.requires_grad]
        kept = min(leaving, key=lambda parameter: parameter.numel(), default=None)
        into = [parameter for parameter in into if parameter is kept or id(parameter) not in self._offloaded]
        return list({id(parameter): parameter for parameter in into}.values())

    def measure_gradients(self) -> None:
        """Takes the gradients as they are now."""
        if isinstance(self.optimizer, Partitioned):
            return  # those of the parameters are this rank's alone, and on their way into a partition
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
        self.positions = tuple(sorted(self.parts))
        self.block = stats.side_by_side([self.parts[at] for at in self.positions]) if self.parts else None

    def forget_step(self) -> None:
        """Starts the next step afresh."""
        self.block, self.again, self.scale, self.found_inf = None, None, None, None
        self.parts, self.stepped = {}, False
        self.expected_backwards, self.backwards = self.backwards, 0
        self.clip_comes, self.clip_came = self.clip_came, False
        self.before_clipping, self.closure = True, False
        self._versions = []
        if self.changes is not None:
            self.changes.settle()

    def note_versions(self) -> None:
        """Remembers at an end of backward what the gradients are, without a look at their values."""
        self._versions = self._versions_now()

    def unchanged(self) -> bool:
        """Whether nobody seems to have changed the gradients since, in a loop that was never seen to."""
        return bool(self._versions) and self._versions == self._versions_now() and not self.reread.clips

    def count_backward(self) -> None:
        """One more backward has ended."""
        self.backwards += 1
        if self.backwards == 1 and self.parameters:
            self._version = self.parameters[0]._version

    @property
    def is_left_behind(self) -> bool:
        """Whether as of the last backward somebody else has been updating the parameters for long."""
        return self.backwards == LONG and bool(self.parameters) and self.parameters[0]._version > self._version

    def touched(self) -> bool:
        """Whether the gradients are not those that an end of backward has left."""
        return bool(self._versions) and self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        reread = self.reread.always + self.reread.sometimes
        gradients = [gradient for at in reread if (gradient := self.parameters[at].grad) is not None]
        return [*map(id, gradients), *(gradient._version for gradient in gradients)]

    def share_of(self, clipped: list[int]) -> tuple[tuple[int, ...], Indexes | None]:
        """Positions of these parameters among those of a clip, given by identity, and where each stands there.

        None for the places where they are the same.
        """
        if clipped != self._clip[0]:
            found = {self.places[one]: at for at, one in enumerate(clipped) if one in self.places}
            positions = tuple(sorted(found))
            places = np.array([found[position] for position in positions], dtype=np.intp)
            same = np.array_equal(places, np.arange(len(clipped)))
            self._clip = (clipped, positions, None if same else places)
        return self._clip[1:]

    def whole(self, positions: tuple[int, ...]) -> bool:
        """Whether every parameter that has a gradient is among these."""
        if len(positions) == len(self.parameters):
            return True
        there = set(positions)
        return all(parameter.grad is None for at, parameter in enumerate(self.parameters) if at not in there)

    def harvest(self, positions: tuple[int, ...], norms: Values) -> None:
        """Takes finite norms that a clip has computed, in place of a pass."""
        self.positions = positions
        if norms.min() < _SMALLEST_NORM:  # zero, or squares that underflowed
            tiny = np.flatnonzero(norms < _SMALLEST_NORM).tolist()
            gradients = [self.parameters[positions[at]].grad for at in tiny]
            norms = norms.copy()
            norms[tiny] = stats.measure([gradient for gradient in gradients if gradient is not None])[0]
        self.block = norms[None]

    def read_again(self, *, thorough: bool, still_scaled: bool) -> None:
        """Takes a few gradients as the update will use them, from which follows what clipping did."""
        reread, block = self.reread, self.block
        if isinstance(block, np.ndarray) and (thorough or not self._usable(reread.always, block)):
            reread.choose(self.positions, block)
        wanted = reread.always + reread.sometimes if thorough or reread.uneven else reread.always
        there = set(self.positions)
        pairs = [(at, gradient) for at in wanted if at in there and (gradient := self._now(at)) is not None]
        if pairs:
            self.references = tuple(at for at, _ in pairs)
            self.again = stats.measure([gradient for _, gradient in pairs])
            self.still_scaled = still_scaled

    def rewritten(self) -> bool:
        """Whether what was read again is known to be another gradient than the one that a backward left."""
        if not (isinstance(self.block, np.ndarray) and isinstance(self.again, np.ndarray)) or self.scale is not None:
            return False  # known to the worker thread alone
        columns = [self.positions.index(at) for at in self.references]
        if not any(self.again[0, j] > 1.001 * self.block[0, at] for j, at in enumerate(columns)):
            return False  # nearly always, and an array would cost more
        self.reread.change(self.block[:, columns], self.again)
        if self.reread.rewritten:
            self.again = None
        return self.reread.rewritten

    def _usable(self, references: tuple[int, ...], block: Values) -> bool:
        norms = [block[0, self.positions.index(at)] for at in references if at in self.positions]
        return any(0 < norm < np.inf for norm in norms)

    def _now(self, at: int) -> Tensor | None:
        """This rank's values of one gradient, where it has them."""
        gradient = self.parameters[at].grad
        if gradient is None or not self._shares:
            return gradient
        return self._shares[at].of(gradient) if self._shares[at].known(gradient) else None

    def signature(self) -> Signature:
        """What must be the same in a run that goes on with this one's baselines."""
        elements = dict.fromkeys(self.plan.layers, 0)
        for owner, shape in zip(self.plan.owners.tolist(), self._shapes, strict=True):
            elements[self.plan.layers[owner]] += shape.numel()
        kind = self.optimizer.name if isinstance(self.optimizer, Partitioned) else type(self.optimizer).__name__
        return Signature(kind=kind, layers=elements)

    def close_state(self, pending: Pending) -> None:
        """Takes parameters and optimizer state after the update into a closing step."""
        whole = None if self._shares else stats.adam_state(self.optimizer, self.parameters)
        if whole is not None:
            self._rebuilt = whole.updates
            pending.blocks |= whole.blocks
            pending.moments = dict.fromkeys(("momentum", "second_moment"), whole.holders)
            return
        parameters = self._local(self.parameters)
        if parameters is None:
            return
        pending.blocks["parameters"] = stats.measure(parameters, self.layout(self.everything))
        lists = stats.state_lists(self.keeper, self.parameters)
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
            rebuilt = self._rebuilt or stats.update_norms(self.optimizer, self.parameters)
            self._rebuilt = None
        if rebuilt is not None:
            pending.updates, pending.blocks["updates"] = rebuilt
        return rebuilt is not None

    def _share_updates(self) -> tuple[tuple[int, ...], stats.Block] | None:
        stands = [
            Stand(parameter, share, self.keeper.state.get(parameter, {}))
            for parameter, share in zip(self.parameters, self._shares, strict=True)
        ]
        groups = []
        for group in self.optimizer.param_groups:
            members = {id(parameter) for parameter in group["params"]}
            groups.append({**group, "params": [stand for stand in stands if id(stand.parameter) in members]})
        return stats.rebuilt_norms(type(self.optimizer), {s: s.state for s in stands}, groups, stands)
