"""Updates that no optimizer announces: seen by parameters that are not what they were.

torch counts the changes of a tensor in place, but not those through ``.data``. For them one element is compared, the
one of largest gradient in the smallest parameter that has any; on an accelerator, where comparing would wait for the
device, a gradient that was cleared or replaced stands for the update.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gradexporter import stats

if TYPE_CHECKING:
    from gradexporter.hooks.layers import Layer
    from gradexporter.hooks.watched import Watched

PATIENCE = 3
"""Training forwards without a backward after which a model is looked at: what functional_call lends it is gone by
then, or came with a gradient."""

BLIND_FORWARDS = 100
"""Training forwards without a single backward after which we say that we see nothing."""

_log = logging.getLogger("gradexporter")
_version = operator.attrgetter("_version")


class Changes:
    """Whether the parameters of one optimizer were changed since the last look."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.trained = False
        """Whether a training forward or backward has run since the last update: what changes before is no update."""
        self._parameters = parameters
        self._sizes = np.array([parameter.numel() for parameter in parameters])
        self._element: tuple[Tensor, int, float] | None = None
        self._gradient: tuple[Tensor, int, int] | None = None
        self._counted = False
        self.remember()

    def remember(self) -> None:
        """Takes the parameters as they are now for what an update changes."""
        self._versions = list(map(_version, self._parameters))

    def backward_ended(self, positions: Sequence[int], block: stats.Block | None) -> None:
        """A backward has left gradients at ``positions``; ``block`` has their norms."""
        self.trained = True
        self._element = self._gradient = None
        if block is None or self._counted:
            return
        if isinstance(block, np.ndarray):
            listed = np.array(positions)
            moving = listed[np.isfinite(block[0]) & (block[0] > 0)]
            if not len(moving):
                return
            parameter = self._parameters[moving[np.argmin(self._sizes[moving])]]
            if type(parameter.grad) is Tensor:
                at = stats.host.largest(parameter.grad)
                self._element = parameter, at, stats.host.element(parameter, at)
        else:
            parameter = self._parameters[positions[-1]]
            self._gradient = parameter, id(parameter.grad), _version(parameter.grad)

    def happened(self) -> bool:
        """Whether an update was applied since the parameters were remembered."""
        if not self.trained:
            self.remember()
            return False
        return self.moved()

    def moved(self) -> bool:
        """Whether the parameters are not what was remembered, for whatever reason."""
        if list(map(_version, self._parameters)) != self._versions:
            self._counted = True
            return True
        if self._element is not None:
            parameter, at, value = self._element
            now = stats.host.element(parameter, at)
            return now != value and (now == now or value == value)
        if self._gradient is not None:
            parameter, identity, version = self._gradient
            return id(parameter.grad) != identity or _version(parameter.grad) != version
        return False

    def settle(self) -> None:
        """The update has been seen to."""
        self.trained = False
        self._element = self._gradient = None
        self.remember()


class Lookout:
    """Looks for the updates of those optimizers of a model that do not announce them; false when there are none."""

    def __init__(self, watched: Sequence[Watched], layers: Sequence[Layer]) -> None:
        self._watched = [one for one in watched if not one.announced]
        self._modules = [layer.module for layer in layers if layer.module is not None]
        self._trained = self._trained_now()
        self.due = False
        """Whether a backward has ended since the last look."""

    def __bool__(self) -> bool:
        return bool(self._watched)

    def _trained_now(self) -> list[int]:
        if not self._watched:
            return []
        parameters = (parameter for module in self._modules for parameter in module._parameters.values())
        return [id(parameter) for parameter in parameters if parameter is not None and parameter.requires_grad]

    def rearranged(self) -> bool:
        """Whether the model trains other parameters than those that were found."""
        return self._trained_now() != self._trained

    def updated(self) -> list[Watched]:
        """Those that have been updated since this was last asked."""
        self.due = False
        found = []
        for watched in self._watched:
            if watched.stepped or (watched.changes is not None and watched.changes.happened()):
                if watched.block is None:  # the backward of these failed midway
                    watched.join_parts()
                found.append(watched)
        return found

    def forward_ended(self) -> None:
        """A training forward has ended; some layers change their parameters in it, which is no update."""
        for watched in self._watched:
            if watched.changes is not None:
                watched.changes.trained = True
                watched.changes.remember()

    def begins_anew(self, watched: Watched, parameter: Tensor) -> bool:
        """Whether a backward that begins with ``parameter`` comes after the last; within it, checkpoints run others."""
        return not watched.announced and (not watched.parts or watched.places.get(id(parameter)) in watched.parts)

    def backward_ended(self, watched: Watched) -> None:
        """Takes the gradients of a backward, which may have applied the update and cleared them."""
        self.due = True
        updated = watched.stepped or (watched.changes is not None and watched.changes.moved())
        gone = updated and any(p.requires_grad and p.grad is None for p in watched.parameters)
        if watched.accumulated is not None:
            watched.accumulated.one_by_one = gone
        if gone:
            watched.join_parts()
        else:
            watched.parts = {}
            watched.measure_gradients()
        if watched.changes is not None:
            watched.changes.backward_ended(watched.positions, watched.block)


class Sight:
    """Whether training happens where we cannot see it: forwards come, and never a backward."""

    def __init__(self) -> None:
        self._forwards: int | None = 0

    def backward(self) -> None:
        """A gradient of the model's own parameters was seen."""
        self._forwards = None

    def lost(self, replaced: Callable[[], bool]) -> bool:
        """Counts a training forward; true, and in the log, at the one from which on it must be said.

        ``replaced`` says whether the model has none of the parameters left that it had when it was watched.
        """
        if self._forwards is None:
            return False
        self._forwards += 1
        if self._forwards == PATIENCE and replaced():
            _log.warning(
                "gradexporter: the model has none of the parameters that the optimizer given to watch() holds: it was "
                "sharded, wrapped or moved afterwards, and no step of it can be seen; call watch() on the wrapped "
                "model, with the optimizer that was built from it"
            )
            return True
        if self._forwards != BLIND_FORWARDS:
            return False
        _log.warning(
            "gradexporter: %d forwards in training mode, and no gradient of the model's own parameters; steps by "
            "torch.func, or on copies of the parameters, cannot be seen",
            BLIND_FORWARDS,
        )
        return True
