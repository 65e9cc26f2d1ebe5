"""Keras callbacks of tfgpu; they work in `model.fit` and in `Trainer.fit`."""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
