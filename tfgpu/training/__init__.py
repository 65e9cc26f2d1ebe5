"""Training: `Trainer`, and learning-rate schedules by name."""

from tfgpu.training.trainer import Trainer

__all__ = ["Trainer"]
