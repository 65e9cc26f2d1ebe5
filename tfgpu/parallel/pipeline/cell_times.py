"""When each cell of a pipeline begins and ends, taken in the graph while someone looks on.

A stamp is an operation of Python that stands between a cell and what goes into it, or comes out. It reads a number of
each, so that a GPU has computed them. It cannot be a stateful operation: TensorFlow runs those one after the other. One
without a state, on which nothing depends but by control, TensorFlow takes out: so a draw of no random numbers, which is
stateful and may run in any order, takes what it returns.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.core import replication


class CellClock:
    """Puts stamps into the steps that are traced while it is on.

    Attributes:
        note: called with a cell, its device's number, whether it repeats a forward pass, whether it has ended, and the
            time in seconds; None where nobody looks on.
    """

    def __init__(self):
        self.note: Callable | None = None

    @property
    def is_on(self) -> bool:
        """Whether stamps are wanted here: of several replicas the first one's."""
        if self.note is None:
            return False
        context = replication.replica_context()
        return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0

    def stamp(self, values: Sequence, *about) -> tf.Tensor:
        """An operation that notes the time once these values are there."""
        note = self.note

        def take(*_):
            note(*about, time.perf_counter())
            return np.zeros(1, "int32")

        samples = [tf.reshape(value, [-1])[:1] for value in values]
        shape = tf.numpy_function(take, samples or [tf.zeros([])], tf.int32, stateful=False)
        return tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=1, seed2=1)


def after(stamps: Sequence[tf.Tensor], results: list) -> list:
    """The same results, the first of which waits for stamps, which would not run otherwise."""
    at = next((at for at, value in enumerate(results) if value is not None), None)
    if stamps and at is not None:
        with tf.control_dependencies(stamps):
            results[at] = tf.nest.map_structure(tf.identity, results[at], expand_composites=True)
    return results
