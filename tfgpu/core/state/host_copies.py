"""Copies variables to host memory, all in one call.

One by one, a GPU would be idle for each variable: TensorFlow starts a copy and waits for it. In one function it starts
all copies at once, into pinned memory, and waits once.
"""

import math
import operator
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.variables import held, local_copy

_Range = tuple[int, int] | None


class _Reader:
    """Reads the same variables, or stretches of them, repeatedly."""

    def __init__(self, variables: Sequence[tf.Variable], stretches: Sequence[_Range]):
        self.variables, self.stretches = tuple(variables), tuple(stretches)
        self.read = tf.function(self._read, autograph=False)

    def fits(self, variables: Sequence[tf.Variable], stretches: Sequence[_Range]) -> bool:
        same = len(variables) == len(self.variables) and all(map(operator.is_, variables, self.variables))
        return same and tuple(stretches) == self.stretches

    def _read(self) -> list[tf.Tensor]:
        # Few operations, as a large model has thousands of variables. A read runs where its variable is.
        values = [tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype) for each in self.variables]
        for at, (variable, stretch) in enumerate(zip(self.variables, self.stretches, strict=True)):
            if stretch is not None and not _shares_memory(variable):  # so that no more is sent to the host
                with tf.device(variable.device):
                    values[at] = tf.reshape(values[at], [-1])[stretch[0] : stretch[1]]
        with tf.device("CPU:0"):
            return tf.identity_n(values)


def copy(
    owner: object, variables: Sequence[keras.Variable | tf.Variable], *, stretches: Sequence[_Range] | None = None
) -> list[np.ndarray]:
    """Copies variables as they are now.

    Args:
        owner: a model; it keeps the function that reads its variables.
        variables: any variables. Replicated ones of this process are read on the first replica, in one call; the
            others, such as sharded variables, read themselves.
        stretches: for each variable, the first of its numbers (in a row) to copy and the one after the last; None
            copies whole variables.

    Returns:
        An array for each variable, which nothing else writes to; of a stretch that is not the whole, in one dimension.
    """
    stretches = [_part(*pair) for pair in zip(variables, stretches or [None] * len(variables), strict=True)]
    plain = {at: variable for at, each in enumerate(variables) if (variable := _plain(each)) is not None}
    wanted = tuple(plain.values()), tuple(stretches[at] for at in plain)
    reader = _reader(owner, *wanted)
    with tf.device("CPU:0"):  # results of a function request no device, and would be placed on the first GPU
        values = dict(zip(plain, reader.read() if plain else (), strict=True))
    return [
        _array(values[at], plain[at], stretches[at]) if at in values else _own(variable, stretches[at])
        for at, variable in enumerate(variables)
    ]


def _reader(owner: object, variables: tuple, stretches: tuple) -> _Reader:
    """The function that reads these; the last two are kept, as saves with and without metrics take turns."""
    known = slots.get(owner, "readers", [])
    found = next((each for each in known if each.fits(variables, stretches)), None) or _Reader(variables, stretches)
    slots.of(owner).readers = [found, *(each for each in known if each is not found)][:2]
    return found


def _part(variable, stretch: _Range) -> _Range:
    """The stretch, or None for the whole variable."""
    return None if stretch is None or stretch == (0, math.prod(variable.shape)) else stretch


def _own(variable, stretch: _Range) -> np.ndarray:
    """What a variable reads itself."""
    value = np.array(variable.numpy())
    return value if stretch is None else value.reshape(-1)[stretch[0] : stretch[1]].copy()


def _plain(variable) -> tf.Variable | None:
    """The TensorFlow variable on a device of this process that holds a variable's value, or None."""
    if isinstance(variable, tf.Variable) and not isinstance(variable, tf.distribute.DistributedValues):
        found = variable
    elif not isinstance(variable, keras.Variable) or held(variable) is None:
        return None
    else:
        found = local_copy(variable)
        if not isinstance(found, tf.Variable) or type(variable).numpy is not keras.Variable.numpy:
            return None
    return found if _process(found.device) == _process(tf.config.list_logical_devices("CPU")[0].name) else None


def _process(device: str) -> tuple[str, int]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.job or "localhost", spec.task or 0


def _array(value: tf.Tensor, variable: tf.Variable, stretch: _Range) -> np.ndarray:
    found = np.asarray(value)
    if not _shares_memory(variable):
        return found
    return found.copy() if stretch is None else found.reshape(-1)[stretch[0] : stretch[1]].copy()


def _shares_memory(variable: tf.Variable) -> bool:
    """Whether what is read shares the variable's memory, which the next step writes to: on a CPU."""
    return tf.DeviceSpec.from_string(variable.device).device_type == "CPU"
