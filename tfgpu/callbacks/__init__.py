"""Keras callbacks of tfgpu; they work in `model.fit` and in `Trainer.fit`."""

from tfgpu.callbacks.checkpoint import Checkpoint, Position
from tfgpu.callbacks.metrics_file import MetricsFile
from tfgpu.callbacks.progress import Progress

__all__ = ["Checkpoint", "MetricsFile", "Position", "Progress"]
