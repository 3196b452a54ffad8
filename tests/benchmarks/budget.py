"""Whether the sampled statistics keep to their budget of a step when nobody fixes how often they are taken."""

from __future__ import annotations

from dataclasses import dataclass

from contestants import Ours
from models import build

from gradexporter.config import Config
from gradexporter.hooks.cadence import ARMED_STEPS


@dataclass
class Budget:
    """What the cadence settled on."""

    model: str
    budget: float
    every: int
    """Steps between two full measurements, the fewest that it chose once it was free to."""
    exceeded: bool
    full_steps: int
    """Steps that were measured in full meanwhile ..."""
    steps: int
    """... of so many."""


def measure(name: str, *, small: bool = False) -> Budget:
    """Runs past the steps that are always measured in full, then ``steps`` more."""
    subject = build(name, small=small)
    ours = Ours(subject, kernels="stock")
    state = ours.monitor.state_dict()
    state["cadence"]["armed_until"] = 0  # as in a run that goes on: what breaks at a start is not the question
    assert ours.monitor.load_state_dict(state)
    ours.attach()
    for _ in range(3 * ARMED_STEPS):
        ours.step()
    ours.settle()
    full, steps, every = 0, 20, []
    for _ in range(steps):
        ours.step()
        ours.settle()
        report = ours.monitor.report
        assert report is not None
        full += report.parameter_max_abs is not None
        snapshot = ours.monitor.snapshot
        assert snapshot is not None
        itself = snapshot.itself
        every.append(itself.capture_every_steps["state"])
    ours.detach()
    ours.close()
    return Budget(
        model=name,
        budget=Config().overhead_budget,
        every=min(every),
        exceeded=itself.overhead_budget_exceeded,
        full_steps=full,
        steps=steps,
    )
