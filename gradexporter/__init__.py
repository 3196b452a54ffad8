"""Per-layer training numerics, judged at every step, where operators already look.

Names are resolved lazily, so that the records, the judge and the sinks import with torch absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradexporter.clip import clip_grad_norm_ as clip_grad_norm_
    from gradexporter.config import Config as Config
    from gradexporter.config import ConfigError as ConfigError
    from gradexporter.config import GradexporterError as GradexporterError
    from gradexporter.judge import Judge as Judge
    from gradexporter.monitor import Monitor as Monitor
    from gradexporter.monitor import watch as watch
    from gradexporter.records import Diagnosis as Diagnosis
    from gradexporter.records import Finding as Finding
    from gradexporter.records import StepReport as StepReport

_HOMES = {
    "Config": "config",
    "ConfigError": "config",
    "Diagnosis": "records",
    "Finding": "records",
    "GradexporterError": "config",
    "Judge": "judge",
    "Monitor": "monitor",
    "StepReport": "records",
    "clip_grad_norm_": "clip",
    "watch": "monitor",
}

__all__ = [
    "Config",
    "ConfigError",
    "Diagnosis",
    "Finding",
    "GradexporterError",
    "Judge",
    "Monitor",
    "StepReport",
    "__version__",
    "clip_grad_norm_",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradexporter' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradexporter.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
