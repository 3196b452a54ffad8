"""What goes wrong in each scenario, as data: the command line lists them without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gradexporter.records import Shape


class Trouble(Enum):
    """What is done to an otherwise sound run; ``training`` acts on it."""

    NONE = "none"
    LARGE_BATCH = "large_batch"
    """The pixels of one batch are a hundred times too large."""
    NAN_PIXEL = "nan_pixel"
    """One pixel of one batch is NaN."""
    NO_TARGETS = "no_targets"
    """Every label of one batch is to be ignored: the mean over no element is 0/0."""
    LOG_OF_ZERO = "log_of_zero"
    """A cross-entropy written by hand, over the shares of ReLU outputs: 0 * log(0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One seeded training run: the digits network with one thing changed."""

    name: str
    story: str
    """One sentence: what is done, and what comes of it."""
    shape: Shape | None
    """What the judge must call it; None for a run that must raise no alarm."""
    steps: int = 64
    learning_rate: float = 0.05
    momentum: float = 0.0
    clip_norm: float | None = None
    """Gradient norm above which the gradient is clipped; None never clips."""
    trouble: Trouble = Trouble.NONE
    trouble_step: int = 40
    """Step of the one bad batch, where the trouble is one batch."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="spike_cascade",
            story="A high learning rate with momentum: a spike, then amplification, then NaN.",
            shape=Shape.SPIKE_CASCADE,
            momentum=0.9,
        ),
        Scenario(name="healthy", story="The cascade's run without momentum: it just learns.", shape=None),
        Scenario(
            name="bad_batch",
            story="The healthy run meets one batch whose pixels are a hundred times too large.",
            shape=Shape.BAD_BATCH,
            trouble=Trouble.LARGE_BATCH,
        ),
        Scenario(
            name="nan_input",
            story="The healthy run meets one batch with a NaN among its pixels.",
            shape=Shape.BAD_INPUT,
            trouble=Trouble.NAN_PIXEL,
        ),
        Scenario(
            name="undefined_operation",
            story="The healthy run meets one batch without a single usable label: the mean loss is 0/0.",
            shape=Shape.UNDEFINED_OPERATION,
            trouble=Trouble.NO_TARGETS,
        ),
        Scenario(
            name="nan_from_start",
            story="A cross-entropy written by hand takes 0 * log(0) at the very first step.",
            shape=Shape.NAN_FROM_START,
            trouble=Trouble.LOG_OF_ZERO,
        ),
        Scenario(
            name="oscillation",
            story="Three times the cascade's rate, tamed by clipping: the loss bounces, finite for ever.",
            shape=Shape.OSCILLATION,
            steps=192,
            learning_rate=0.15,
            momentum=0.9,
            clip_norm=2.0,
        ),
        Scenario(
            name="exploding_gradient",
            story="A momentum above 1: every update is larger than the one before, up to overflow.",
            shape=Shape.EXPLODING_GRADIENT,
            steps=96,
            learning_rate=0.001,
            momentum=1.1,
        ),
    )
}
"""Every scenario by name; the first is the default."""

DEFAULT_SCENARIO = next(iter(SCENARIOS))

DEFAULT_SEED = 1
"""The run whose figures the README gives."""
