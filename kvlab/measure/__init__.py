"""What a strategy costs and what it breaks, measured: memory, latency, quality with the cache in the loop, tasks."""

from kvlab.measure.latency import Latency
from kvlab.measure.memory import predict, predict_curve, predict_high_water
from kvlab.measure.quality import Control, Quality, control, quality
from kvlab.measure.sensitivity import Sensitivity, profile, sensitivity
from kvlab.measure.tasks import Needle, needle

__all__ = [
    "Control", "Latency", "Needle", "Quality", "Sensitivity", "control", "needle", "predict",
    "predict_curve", "predict_high_water", "profile", "quality", "sensitivity",
]  # fmt: skip
