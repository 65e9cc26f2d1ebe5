"""Exports trained models to SavedModel, ONNX and LiteRT, and compares their outputs with the model's.

Example:
    >>> import keras
    >>> from tfgpu import serving
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> made = serving.export(model, "served")
    >>> made.format, made.difference < 1e-5
    ('savedmodel', True)
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
