"""`keras.distribution` on TensorFlow: a warning where Keras silently does nothing."""

import warnings

import keras
from keras.src.distribution import distribution_lib

from tfgpu.compat.patch import wrap


def warn_of_no_distribution() -> None:
    """Says that a distribution has no effect, and what has; Keras's TensorFlow backend leaves its hooks empty."""
    for owner in (keras.distribution, distribution_lib):

        @wrap(owner, "set_distribution")
        def set_distribution(stock, value):
            if value is not None:
                warnings.warn(
                    f"keras.distribution does nothing on TensorFlow: with {type(value).__name__} the model stays on "
                    "one device. Make the model under `with tfgpu.strategy().scope():` instead.",
                    stacklevel=3,
                )
            return stock(value)
