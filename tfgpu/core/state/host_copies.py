"""Copies variables to host memory, all in one call.

One by one, a GPU would be idle for each variable: TensorFlow starts a copy and waits for it. In one function it starts
all copies at once, into pinned memory, and waits once.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.variables import held, local_copy


class _Reader:
    """Reads the same variables repeatedly."""

    def __init__(self, variables: Sequence[tf.Variable]):
        self.variables = tuple(variables)
        self.read = tf.function(self._read, autograph=False)

    def fits(self, variables: Sequence[tf.Variable]) -> bool:
        return len(variables) == len(self.variables) and all(map(_is, variables, self.variables))

    def _read(self) -> list[tf.Tensor]:
        # Few operations, as a large model has thousands of variables. A read runs where its variable is.
        values = [tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype) for each in self.variables]
        with tf.device("CPU:0"):
            return tf.identity_n(values)


def copy(owner: object, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """Copies variables as they are now.

    Args:
        owner: a model; it keeps the function that reads its variables.
        variables: any variables. Replicated ones of this process are read on the first replica, in one call; the
            others, such as sharded variables, read themselves.

    Returns:
        An array for each variable, which nothing else writes to.
    """
    plain = {at: variable for at, each in enumerate(variables) if (variable := _plain(each)) is not None}
    reader = slots.get(owner, "reader")
    if reader is None or not reader.fits(tuple(plain.values())):
        reader = slots.of(owner).reader = _Reader(tuple(plain.values()))
    with tf.device("CPU:0"):  # results of a function request no device, and would be placed on the first GPU
        values = dict(zip(plain, reader.read() if plain else (), strict=True))
    return [_array(values[at], plain[at]) if at in values else np.array(v.numpy()) for at, v in enumerate(variables)]


def _plain(variable) -> tf.Variable | None:
    """The TensorFlow variable on a device of this process that holds a variable's value, or None."""
    if not isinstance(variable, keras.Variable) or held(variable) is None:
        return None
    found = local_copy(variable)
    if not isinstance(found, tf.Variable) or type(variable).numpy is not keras.Variable.numpy:
        return None
    return found if _process(found.device) == _process(tf.config.list_logical_devices("CPU")[0].name) else None


def _process(device: str) -> tuple[str, int]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.job or "localhost", spec.task or 0


def _array(value: tf.Tensor, variable: tf.Variable) -> np.ndarray:
    """On a CPU the tensor shares the variable's memory, which the next step writes to."""
    shares = tf.DeviceSpec.from_string(variable.device).device_type == "CPU"
    return np.asarray(value).copy() if shares else np.asarray(value)


def _is(one: object, other: object) -> bool:
    return one is other
