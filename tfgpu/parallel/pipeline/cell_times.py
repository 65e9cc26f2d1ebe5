"""Measures when each cell of a pipeline begins and ends, inside the graph of a training step.

A timestamp is a Python operation that depends on the cell's inputs or results, and reads one number of each, so that a
GPU has computed them. TensorFlow would run stateful timestamps one after the other, so it is stateless; and it would
remove a stateless operation whose result nothing uses, so the result is the shape of a random draw of no numbers, which
is stateful but may run in any order.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.core import replication


class CellClock:
    """Adds timestamps to the steps that are traced while it is on.

    Attributes:
        note: called with the cell, the number of its device, whether it repeats a forward pass, whether it has ended,
            and the time in seconds. None turns the clock off.
    """

    def __init__(self):
        self.note: Callable | None = None

    @property
    def is_on(self) -> bool:
        """Whether the current replica takes timestamps: only the first one does."""
        if self.note is None:
            return False
        context = replication.replica_context()
        return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0

    def stamp(self, values: Sequence, *about) -> tf.Tensor:
        """An operation that notes the time as soon as these values are computed."""
        note = self.note

        def take(*_):
            note(*about, time.perf_counter())
            return np.zeros(1, "int32")

        samples = [tf.reshape(value, [-1])[:1] for value in values]
        shape = tf.numpy_function(take, samples or [tf.zeros([])], tf.int32, stateful=False)
        return tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=1, seed2=1)


def after(stamps: Sequence[tf.Tensor], results: list) -> list:
    """The same results, where the first one depends on the timestamps, so that TensorFlow runs them."""
    at = next((at for at, value in enumerate(results) if value is not None), None)
    if stamps and at is not None:
        with tf.control_dependencies(stamps):
            results[at] = tf.nest.map_structure(tf.identity, results[at], expand_composites=True)
    return results
