"""Keras callbacks of tfgpu; they work in `model.fit` and in `Trainer.fit`."""

from tfgpu.callbacks.averages import EvaluateAverages
from tfgpu.callbacks.events_file import EventsFile
from tfgpu.callbacks.finite import SkipNaN, StopOnNaN
from tfgpu.callbacks.memory import Memory
from tfgpu.callbacks.metrics_file import MetricsFile
from tfgpu.callbacks.monitor import Monitor
from tfgpu.callbacks.progress import Progress
from tfgpu.callbacks.report import Report
from tfgpu.callbacks.tasks import Tasks
from tfgpu.callbacks.tracking import Track
from tfgpu.checkpoint.callback import Checkpoint

__all__ = [
    "Checkpoint",
    "EvaluateAverages",
    "EventsFile",
    "Memory",
    "MetricsFile",
    "Monitor",
    "Progress",
    "Report",
    "SkipNaN",
    "StopOnNaN",
    "Tasks",
    "Track",
]
