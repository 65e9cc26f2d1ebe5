"""Keras callbacks of tfgpu; they work in `model.fit` and in `Trainer.fit`."""

from tfgpu.callbacks.background import Writer
from tfgpu.callbacks.checkpoint import Checkpoint, Position
from tfgpu.callbacks.events_file import EventsFile
from tfgpu.callbacks.memory import Memory
from tfgpu.callbacks.metrics_file import MetricsFile
from tfgpu.callbacks.progress import Progress
from tfgpu.callbacks.report import Report

__all__ = ["Checkpoint", "EventsFile", "Memory", "MetricsFile", "Position", "Progress", "Report", "Writer"]
