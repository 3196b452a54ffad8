"""What happened to a gradient between the end of backward and the update, told from a few parameters read again.

Clipping by norm multiplies everything by one factor; clipping by value, by layer or by hand does not, and then
there is no factor to publish. Scaling the loss by hand is one factor too, but the same one at every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradexporter.records import Values

SMALL_NUMEL = 16384
"""Largest parameter that is read again at every step: 64 KiB of float32, some microseconds."""

_UNTOUCHED = 1e-4
"""Relative distance from 1 within which a factor is rounding."""

_SAME_FACTOR = 1e-5
"""Relative distance within which two factors are one: of norms in float32 that were multiplied alike."""

_VARIED = 1.01
"""Ratio of two gradient norms from which on clipping to a norm would have shown in the factor."""

_CONSTANT_STEPS = 4
"""Steps with one factor that are scaling by hand; of a power of two, which is no clip factor by chance, two do."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the parameters that were read again say of the whole gradient."""

    factor: float | None
    """What everything was multiplied by; None where it was not one factor, or cannot be told."""
    clipped: bool | None
    """Whether something was made smaller; None where it cannot be told."""


class Reread:
    """Which parameters of one optimizer are read again before its update.

    One object an optimizer. The trainer thread asks; where gradients are on an accelerator the worker thread tells,
    one step late.
    """

    def __init__(self, sizes: Sequence[int], tolerance: float = 1e-3) -> None:
        """``sizes`` are elements of each parameter; ``tolerance`` is relative, and wider for half precision."""
        self._sizes = np.array(sizes)
        self._tolerance = tolerance
        order = np.argsort(self._sizes, kind="stable").tolist()
        self.always: tuple[int, ...] = tuple(order[:1])
        """Small ones, by position: read again before every update."""
        self.sometimes: tuple[int, ...] = tuple(order[-1:]) if len(order) > 1 else ()
        """The ones that clipping of any kind would reach first, however large."""
        self.clips = False
        """Whether anything was ever changed between the end of backward and the update."""
        self.uneven = False
        """Whether clipping was ever seen that is not one factor."""
        self.rewritten = False
        """Whether gradients ever became larger, and not all alike: no clipping, the loop makes the gradient itself."""
        self.constant = False
        """Whether a factor other than 1 stays the same while the gradient changes: scaling by hand."""
        self._factor = math.nan
        self._steps = 0
        self._lowest = self._highest = math.nan

    def choose(self, positions: Sequence[int], block: Values) -> None:
        """Picks parameters by their gradients; ``block`` is as ``stats.measure`` gives it, one column a position."""
        norms = block[0]
        usable = np.flatnonzero((norms > 0) & (norms < math.inf))
        if not len(usable):
            return
        at = np.asarray(positions, dtype=np.intp)
        sizes, found = self._sizes[at[usable]], norms[usable]
        always = [usable[np.argmin(sizes)]]
        sometimes = [usable[np.argmax(found)]]
        small = np.flatnonzero(sizes <= SMALL_NUMEL)
        if len(small):  # of layers far apart, and the one that is clipped last
            sometimes += [usable[small[0]], usable[small[-1]], usable[small[np.argmin(found[small])]]]
        if len(block) > 1:
            largest = block[1, usable]
            sometimes.append(usable[np.argmax(largest)])
            if len(small):
                always.append(usable[small[np.argmax(largest[small])]])
        self.always = tuple(dict.fromkeys(int(at[one]) for one in always))
        self.sometimes = tuple(
            position for position in dict.fromkeys(int(at[one]) for one in sometimes) if position not in self.always
        )

    def change(self, before: Values, after: Values) -> Change:
        """What happened; both are shaped as ``stats.measure`` gives them, ``before`` perhaps its first row alone."""
        rows = min(len(before), 2)
        was, now = before[:rows], after[:rows]
        usable = (was > 0) & (was < math.inf)
        factors = now[usable] / was[usable]
        if not factors.size:
            return Change(None, None)
        if np.isnan(factors).any():
            self.clips = True
            return Change(math.nan, False)
        low, high = float(factors.min()), float(factors.max())
        if high - low > self._tolerance * high:
            self.clips = self.uneven = True
            self.rewritten |= 1 + self._tolerance < high < math.inf
            smaller = high <= 1 + self._tolerance and low < 1 - self._tolerance
            return Change(None, smaller)
        norms = now[0][usable[0]] / was[0][usable[0]]
        listed = sorted((norms if norms.size else factors).tolist())
        factor = listed[len(listed) // 2]
        if abs(factor - 1) < _UNTOUCHED:
            return Change(1.0, False)
        self.clips = True
        return Change(factor, factor < 1)

    def follow(self, change: Change, norm: float | None) -> None:
        """Notes the factor of one step beside the norm of its gradient before it, and sees whether it is constant."""
        factor = change.factor
        if factor is None or factor == 1.0 or not 0 < factor < math.inf or norm is None or not 0 < norm < math.inf:
            self._steps = 0
            return
        if not self._steps or abs(factor / self._factor - 1) > _SAME_FACTOR:
            self._factor, self._steps, self._lowest, self._highest = factor, 0, norm, norm
        self._steps += 1
        self._lowest, self._highest = min(self._lowest, norm), max(self._highest, norm)
        exponent = math.log2(factor)
        needed = 2 if abs(exponent - round(exponent)) < _SAME_FACTOR else _CONSTANT_STEPS
        if self._steps >= needed and self._highest > _VARIED * self._lowest:
            self.constant = True
