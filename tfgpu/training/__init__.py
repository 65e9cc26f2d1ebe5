"""Training loops: `Trainer` beside `model.fit`, and the learning-rate schedules of a recipe."""

from tfgpu.training.trainer import Trainer

__all__ = ["Trainer"]
