"""A run's past as plain Python, and back: what a checkpoint holds so that a restart is judged without a warm-up.

Made of dicts, lists, strings, numbers and None, so that ``torch.load(weights_only=True)`` and JSON carry it.
Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradexporter.config import JudgeConfig
from gradexporter.judge import Judge
from gradexporter.records import Signature

VERSION = 1


class ResumeError(ValueError):
    """A saved state that this run cannot continue from; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A run up to a step."""

    step: int
    """The last that was closed."""
    timestamp: float
    """Unix seconds at which it was saved."""
    judges: tuple[Judge, ...]
    """One an optimizer."""
    checkpoints: tuple[int, ...]
    """Steps whose checkpoints were written."""
    first: int
    """Step that the rhythm of sampling counts from ..."""
    armed_until: int
    """... and the last one to be measured in full."""

    def state_dict(self, signatures: Sequence[Signature]) -> dict[str, Any]:
        """Plain Python; ``from_state_dict`` is its inverse."""
        return {
            "gradexporter": VERSION,
            "step": self.step,
            "timestamp": self.timestamp,
            "optimizers": [
                {"kind": own.kind, "layers": dict(own.layers), "judge": judge.state_dict()}
                # Optimizers that update together need the first judge alone.
                for own, judge in zip(signatures, self.judges[: len(signatures)], strict=True)
            ],
            "checkpoints": list(self.checkpoints),
            "cadence": {"first": self.first, "armed_until": self.armed_until},
        }

    @classmethod
    def from_state_dict(cls, state: object, signatures: Sequence[Signature], config: JudgeConfig) -> Past:
        """The past of a run with these optimizers; raises ResumeError, in words, for anything else."""
        if not isinstance(state, Mapping):
            raise ResumeError(f"a saved state is a dict, this is a {type(state).__name__}")
        if not state:
            raise ResumeError("nothing was saved, as by a monitor that is disabled")
        if "gradexporter" not in state:
            raise ResumeError("this is no state of a monitor, but some other dict")
        if state["gradexporter"] != VERSION:
            raise ResumeError(f"the saved state is of version {state['gradexporter']!r}, and {VERSION} is known")
        try:
            _compare(state["optimizers"], signatures)
            return cls(
                step=_count(state["step"]),
                timestamp=float(state["timestamp"]),
                judges=tuple(_judge(saved["judge"], config) for saved in state["optimizers"]),
                checkpoints=tuple(_count(step) for step in state["checkpoints"]),
                first=_count(state["cadence"]["first"]),
                armed_until=_count(state["cadence"]["armed_until"]),
            )
        except ResumeError:
            raise
        except Exception as error:
            raise ResumeError(f"the saved state is damaged: {error!r}") from error


def together(state: object) -> bool:
    """Whether the optimizers of the saved run made one update together, which this run has yet to find out."""
    saved = state.get("optimizers") if isinstance(state, Mapping) else None
    return isinstance(saved, list) and [one.get("kind") for one in saved if isinstance(one, Mapping)] == ["Together"]


def _judge(state: Mapping[str, Any], config: JudgeConfig) -> Judge:
    judge = Judge(config)
    judge.load_state_dict(state)
    return judge


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ResumeError(f"the saved state is damaged: {value!r} is no step")
    return value


def _compare(saved: Sequence[Mapping[str, Any]], signatures: Sequence[Signature]) -> None:
    if len(saved) != len(signatures):
        raise ResumeError(f"the saved run had {len(saved)} optimizers, this one has {len(signatures)}")
    for one, own in zip(saved, signatures, strict=True):
        if one["kind"] != own.kind:
            raise ResumeError(f"the saved run had the optimizer {one['kind']}, this one has {own.kind}")
        theirs, ours = dict(one["layers"]), dict(own.layers)
        if theirs == ours:
            continue
        odd = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        name = odd[0]
        where = "only the saved model has" if name not in ours else "only this model has" if name not in theirs else ""
        what = f"{where} the layer {name!r}" if where else f"the layer {name!r} had another size"
        raise ResumeError(f"the saved state is of another model: {what} ({len(odd)} layers differ)")
