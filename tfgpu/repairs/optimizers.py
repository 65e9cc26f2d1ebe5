"""Optimizers under replicas."""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import gradients
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def check_every_row() -> None:
    """Loss scaling checks each row of a sparse gradient.

    Stock Keras writes the rows' answers into a table of the variable's shape. Of a token that occurs twice in a batch
    the last row decides: an infinite gradient before it is missed, and the update makes the weights infinite. And a GPU
    copies that table to the host and back in each step, as TensorFlow has no kernel there for a scatter of bool.
    """

    @wrap("LossScaleOptimizer.check_finite")
    def check_finite(stock, self, grads):
        return stock(self, [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads])


def clipping_differs() -> bool:
    """Whether gradients are clipped before they are summed."""
    return probing.differs(rows=2, optimizer={"global_clipnorm": 0.1})


def accumulation_fails() -> bool:
    """Whether gradient accumulation crashes or gives other weights."""
    return probing.differs(rows=2, optimizer={"gradient_accumulation_steps": 2})


def overflow_is_missed() -> bool:
    """Whether a finite row hides an infinite one of the same token."""
    rows = tf.constant([[float("inf")], [0.0]])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return bool(optimizer.check_finite([tf.IndexedSlices(rows, tf.constant([1, 1]), tf.constant([3, 1]))]))


REPAIRS = (
    Repair(
        name="gradients-meet-first",
        fault="gradients are clipped, checked and accumulated on each replica before they are summed",
        issue="https://github.com/keras-team/keras/issues/20582",
        probe=clipping_differs,
        apply=gradients.sum_before_applying,
    ),
    Repair(
        name="local-updates",
        fault="accumulation and moving averages call merge_call inside a condition and crash",
        issue="https://github.com/keras-team/keras/issues/20582",
        probe=accumulation_fails,
        apply=gradients.apply_on_every_replica,
    ),
    Repair(
        name="sparse-overflow",
        fault="loss scaling misses an infinite row of a sparse gradient where a later row of the token is finite",
        issue="",
        probe=overflow_is_missed,
        apply=check_every_row,
    ),
)
