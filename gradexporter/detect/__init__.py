"""Is this step odd? Baselines of every series, and the rules that compare a step with them."""

from __future__ import annotations

from gradexporter.detect.baseline import Baselines as Baselines
from gradexporter.detect.detector import Detection as Detection
from gradexporter.detect.detector import Detector as Detector
from gradexporter.detect.nonfinite import execution_order as execution_order
from gradexporter.detect.nonfinite import nonfinite_quantities as nonfinite_quantities
from gradexporter.detect.nonfinite import producer as producer
