"""`keras.distribution` on TensorFlow: a warning where Keras silently does nothing."""

import warnings

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.repairs.repair import Repair


def warn_about_distribution() -> None:
    """Warns that a distribution has no effect: Keras's TensorFlow backend leaves its hooks empty."""
    for owner in ("keras.distribution", "distribution_lib"):

        @wrap(f"{owner}.set_distribution")
        def set_distribution(stock, value):
            if value is not None:
                warnings.warn(
                    f"keras.distribution does nothing on TensorFlow: with {type(value).__name__} the model stays on "
                    "one device. Create the model under `with tfgpu.strategy().scope():` instead.",
                    stacklevel=3,
                )
            return stock(value)


def distribution_is_silent() -> bool:
    """Whether a distribution over two devices silently leaves a variable on one."""
    before = keras.distribution.distribution()
    try:
        parallel = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    except AttributeError:  # up to Keras 3.14 it cannot be created on TensorFlow, which is an error and not silent
        return False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keras.distribution.set_distribution(parallel)
        value = keras.Variable([1.0]).value
        keras.distribution.set_distribution(before)
    return not said and not isinstance(value, tf.distribute.DistributedValues)


REPAIRS = (
    Repair(
        name="no-distribution",
        fault="keras.distribution silently does nothing on TensorFlow",
        issue="",
        probe=distribution_is_silent,
        apply=warn_about_distribution,
        since="3.15",
    ),
)
