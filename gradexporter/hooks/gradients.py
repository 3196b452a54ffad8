"""When the gradients of an update are measured: at the end of backward, by a clip of ours, or late."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from torch.amp.grad_scaler import GradScaler

from gradexporter.hooks import scaler
from gradexporter.hooks.reduction import WhenReduced
from gradexporter.hooks.watched import Watched
from gradexporter.records import Values

_ALIKE = 1e-3
"""Relative distance within which factors of several gradients are one."""

_log = logging.getLogger("gradexporter")


class Gradients:
    """Takes each update's gradients once, before anything changes them if that can be had."""

    def __init__(self, signals: dict[str, bool], scaling: GradScaler | None, when_reduced: WhenReduced) -> None:
        """``signals`` says what is available and is kept up to date; ``scaling`` is the scaler if one was passed."""
        self.seconds = 0.0
        """What full passes in place of a clip's norms took since it was last set."""
        self._signals = signals
        self._when_reduced = when_reduced
        self._scaling = scaler.Scaling(scaling)
        self._unknown_said = False

    def measure(self, watched: Watched, *, scaled: bool) -> None:
        """One pass over all gradients as they are now; ``scaled`` if they carry a loss scale, should there be one."""
        watched.measure_gradients()
        watched.scaled = scaled
        if watched.unknown and not self._unknown_said:
            self._unknown_said = True
            layers = sorted({watched.plan.layers[owner] for owner in watched.plan.owners[list(watched.unknown)]})
            _log.warning(
                "gradexporter: gradients of %d layers (%s first) are not reduced over ranks when the update reads "
                "them; they are left out, and with them the gradient norm of the model",
                len(layers),
                layers[0],
            )

    def backward_ended(self, watched: Watched) -> None:
        """Measures, unless more is to come: another backward, a clip of ours, or the loop changes gradients itself."""
        watched.clip_came = False
        too_soon = watched.backwards < watched.expected_backwards and watched.backwards not in watched.early
        reread = watched.reread
        by_loop = reread.constant or reread.rewritten or self._when_reduced.follows_backward()
        if too_soon or (watched.clip_comes and watched.probe is not True) or by_loop:
            watched.block = None
            watched.note_versions()
        else:
            self.measure(watched, scaled=True)

    def backward_ended_by_hand(self, watched: Watched) -> None:
        """Notes the scale of gradients that no optimizer announces the use of; the loop divides by it itself."""
        scale = self._scaling.scale()
        if scale is not None:
            watched.scale, watched.scaled = scale, True
            self._signals["loss_scale"] = True

    def clip_begins(self, watched: Watched, parameters: list[int], norms: Values | None, *, full: bool) -> None:
        """A clip of ours is about to scale; ``parameters`` by identity, ``full`` if more than norms is wanted."""
        positions, places = watched.share_of(parameters)
        if not positions:
            return
        serves = norms is not None and watched.harvests and watched.whole(positions)
        if serves:
            watched.clip_came = True
        if watched.block is not None:
            if serves and watched.probe and isinstance(watched.block, np.ndarray):
                self._probed(watched, positions, norms if places is None or norms is None else norms[places])
            return
        unscaled = self._scaling.unscaled(watched)
        if watched.clip_comes and not unscaled and watched.probe is None and watched.touched():
            watched.probe, watched.before_clipping = True, False
            self._signals["pre_clip"] = False
        scaled = not unscaled
        if norms is None or not serves or full:
            began = time.perf_counter()
            self.measure(watched, scaled=scaled)
            self.seconds += time.perf_counter() - began
        else:
            watched.harvest(positions, norms if places is None else norms[places])
            watched.scaled = scaled

    def _probed(self, watched: Watched, positions: tuple[int, ...], norms: Values | None) -> None:
        """Holds the gradients that a clip of ours sees against those that the backward left."""
        watched.probe = False
        before = watched.block[0][np.isin(watched.positions, positions)] if watched.block is not None else None
        if norms is None or before is None or len(before) != len(norms):
            watched.harvests = watched.clip_came = False
            return
        usable = (before > 0) & (before < np.inf)
        factors = norms[usable] / before[usable]
        # One factor is a scale that the loop divides out; else it changes the gradient, and the clip comes too late.
        if factors.size and factors.max() - factors.min() <= _ALIKE * factors.max():
            watched.harvest(positions, norms)
        else:
            watched.harvests = watched.clip_came = False

    def unscaling(self, watched: Watched, scaling: GradScaler, optimizer: Any) -> None:
        """A scaler is about to divide the gradients by its scale; whoever clips does it after that."""
        self._scaling.heard(scaling, watched, optimizer)
        watched.scale = scaler.scale_of(scaling)
        if watched.block is None and not watched.clip_comes:
            self.measure(watched, scaled=True)

    def scaler_steps(self, watched: Watched, scaling: GradScaler, optimizer: Any) -> None:
        """A scaler is about to look at the gradients; on a step that it skips no hook of the optimizer's fires."""
        self._scaling.heard(scaling, watched, optimizer)
        watched.scale = scaler.scale_of(scaling)
        self._signals["loss_scale"] = True
        if watched.block is None:
            self._late(watched, scaled=not self._scaling.unscaled(watched))

    def update_begins(self, watched: Watched, *, still_scaled: bool, thorough: bool) -> None:
        """The parameters are about to change; ``still_scaled`` if the optimizer divides by the scale itself."""
        if watched.scale is None and self._scaling.waits(watched):
            self._signals["loss_scale"] = False  # scaled, and stepped without its scaler
        if watched.block is None:
            self._late(watched, scaled=still_scaled)
        else:
            self._read_again(watched, still_scaled, thorough)

    def closure_ended(self, watched: Watched, *, thorough: bool) -> None:
        """An update with its backward inside is over; the gradients are still those of the last evaluation."""
        if watched.block is None:
            self._late(watched, scaled=False)
        else:
            self._read_again(watched, False, thorough)

    def _read_again(self, watched: Watched, still_scaled: bool, thorough: bool) -> None:
        if watched.before_clipping:
            watched.read_again(thorough=thorough, still_scaled=still_scaled)
            self._signals["pre_clip"] = True
            if watched.rewritten():
                self._late(watched, scaled=still_scaled)

    def _late(self, watched: Watched, *, scaled: bool) -> None:
        """Measures what nothing has measured yet, perhaps after it was clipped."""
        self.measure(watched, scaled=scaled)
        unclipped = watched.unchanged() and not watched.clip_comes
        # What a loop reduces it may clip as well, both where versions do not tell: through .data.
        watched.before_clipping = unclipped and not self._when_reduced.follows_backward()
        self._signals["pre_clip"] = watched.before_clipping
        if watched.reread.constant:
            self._signals["loss_scale"] = False
        elif not watched.before_clipping and not watched.clip_comes:
            watched.early.add(watched.backwards)
