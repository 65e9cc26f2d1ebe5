"""A trained model for other programs: TensorFlow's SavedModel, ONNX, LiteRT, each held against the model itself.

Example:
    >>> import keras
    >>> from tfgpu import serving
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> made = serving.export(model, "served")
    >>> made.format, made.difference < 1e-5
    ('savedmodel', True)
"""

from tfgpu.lazy import on_first_use

_PLACES = {
    "Exported": "tfgpu.serving.exporting",
    "FORMATS": "tfgpu.serving.formats",
    "export": "tfgpu.serving.exporting",
    "run": "tfgpu.serving.running",
}

__all__ = sorted(_PLACES)
__getattr__ = on_first_use(__name__, _PLACES)
