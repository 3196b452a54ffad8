"""Is this step odd? Baselines of every series, and the rules that hold a step against them."""

from __future__ import annotations

from gradexporter.detect.detector import Detection as Detection
from gradexporter.detect.detector import Detector as Detector
from gradexporter.detect.step import Step as Step
from gradexporter.detect.step import ratio as ratio
