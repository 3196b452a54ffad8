"""How often the sampled statistics are taken: what the budget allows, and every step when anything is odd."""

from __future__ import annotations

from gradexporter.config import Config

EVERY_STEP_AT_FIRST = 200
"""Steps at the start of a run that are measured in full: most failures of a new script come early."""

ARMED_STEPS = 16
"""Steps that are measured in full after something odd; as long as the judge's memory of a spike."""

CHOICES = (1, 2, 5, 10)
"""Steps between two full measurements; beyond ten a cascade passes between them."""

_MEMORY = 0.05
"""Weight of the newest step in the running means of costs."""


class Cadence:
    """Decides for each step whether activations and state are measured in full.

    The trainer thread asks and reports costs; the worker thread arms.
    """

    def __init__(self, config: Config) -> None:
        self._fixed = {"activation": config.activation_every, "state": config.state_every}
        self._budget = config.overhead_budget
        self._first = config.start_step
        self._armed_until = config.start_step + EVERY_STEP_AT_FIRST
        self._asked = config.start_step
        self._allowed = 1
        self._exceeded = False
        self._cost: dict[str, float] = {}
        self._step_seconds: float | None = None

    @property
    def every(self) -> dict[str, int]:
        """Steps between two full measurements, by signal, as it is at the moment."""
        free = 1 if self._asked <= self._armed_until else self._allowed
        return {signal: fixed or free for signal, fixed in self._fixed.items()}

    @property
    def exceeded(self) -> bool:
        """Whether even the slowest cadence costs more than the budget."""
        return self._exceeded

    def arm(self, step: int) -> None:
        """Measure the next steps in full: something about ``step`` was odd."""
        self._armed_until = max(self._armed_until, step + ARMED_STEPS)

    def state_dict(self) -> dict[str, int]:
        """Where a continued run goes on; costs are left out, for it may have another machine."""
        return {"first": self._first, "armed_until": self._armed_until}

    def resume(self, first: int, armed_until: int, step: int) -> None:
        """Goes on at ``step`` with the rhythm of the run before, in full for as long as a restart may go wrong."""
        self._first, self._asked = first, step
        self._armed_until = max(armed_until, step + ARMED_STEPS)

    def full(self, signal: str, step: int) -> bool:
        """Whether ``signal`` (activation, state) is measured in full in ``step``."""
        self._asked = step
        every = self._fixed[signal]
        if every is not None:
            return (step - self._first) % every == 0
        return step <= self._armed_until or (step - self._first) % self._allowed == 0

    def spent(self, step_seconds: float | None, **costs: float | None) -> None:
        """Learns what the step and its full measurements cost in seconds; None where there was none."""
        for name, cost in costs.items():
            if cost is not None:
                self._cost[name] = _mean(self._cost.get(name), cost)
        if step_seconds is None:
            return
        self._step_seconds = _mean(self._step_seconds, step_seconds)
        sampled = self._cost.get("state", 0.0)
        if "activation_full" in self._cost:
            sampled += max(0.0, self._cost["activation_full"] - self._cost.get("activation_sentinel", 0.0))
        allowance = self._budget * self._step_seconds
        self._allowed = next((every for every in CHOICES if sampled / every <= allowance), CHOICES[-1])
        self._exceeded = sampled / CHOICES[-1] > allowance


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _MEMORY * (value - before)
