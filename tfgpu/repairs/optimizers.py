"""Optimizers under replicas, and `float(model.optimizer.learning_rate)` as callbacks use it."""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import gradients
from tfgpu.repairs import Repair, probes, probing


def check_every_row() -> None:
    """Loss scaling checks each row of a sparse gradient.

    Stock Keras writes the rows' answers into a table of the variable's shape. Of a token that occurs twice in a batch
    the last row decides: an infinite gradient before it is missed, and the update makes the weights infinite. And a GPU
    copies that table to the host and back in each step, as TensorFlow has no kernel there for a scatter of bool.
    """

    @wrap("LossScaleOptimizer.check_finite")
    def check_finite(stock, self, grads):
        return stock(self, [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads])


@probes("accumulation and moving averages call merge_call inside a condition and crash")
def accumulation_fails() -> bool:
    """Whether gradient accumulation crashes or gives other weights."""
    return probing.differs(rows=2, optimizer={"gradient_accumulation_steps": 2})


@probes("loss scaling misses an infinite row of a sparse gradient where a later row of the token is finite")
def overflow_is_missed() -> bool:
    """Whether a finite row hides an infinite one of the same token."""
    rows = tf.constant([[float("inf")], [0.0]])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return bool(optimizer.check_finite([tf.IndexedSlices(rows, tf.constant([1, 1]), tf.constant([3, 1]))]))


def read_numbers_of_replicated_variables() -> None:
    """Makes `float` and `int` read a Keras variable under any strategy, as on one device.

    Keras delegates to the inner variable, and TensorFlow's distributed ones have no `__float__` or `__int__`; both have
    `numpy`. In a graph, where no variable has a value yet, TensorFlow's own error remains.
    """

    @wrap("KerasVariable.__float__")
    def as_float(stock, self):
        return stock(self) if self.ndim > 0 or hasattr(type(self.value), "__float__") else float(self.value.numpy())

    @wrap("KerasVariable.__int__")
    def as_int(stock, self):
        return stock(self) if self.ndim > 0 or hasattr(type(self.value), "__int__") else int(self.value.numpy())


@probes("`float(model.optimizer.learning_rate)`, which callbacks use, raises under replicas")
def learning_rate_is_unreadable() -> bool:
    """Whether Python cannot read a variable on several devices."""
    with probing.mirrored().scope():
        optimizer = keras.optimizers.SGD(0.5)
    try:
        return float(optimizer.learning_rate) != 0.5
    except TypeError:
        return True


@probes("gradients are clipped, checked and accumulated on each replica before they are summed")
def clipping_differs() -> bool:
    """Whether gradients are clipped before they are summed."""
    return probing.differs(rows=2, optimizer={"global_clipnorm": 0.1})


REPAIRS = (
    Repair(
        "gradients-meet-first",
        clipping_differs,
        gradients.sum_before_applying,
        issue="https://github.com/keras-team/keras/issues/20582",
    ),
    Repair(
        "local-updates",
        accumulation_fails,
        gradients.apply_on_every_replica,
        issue="https://github.com/keras-team/keras/issues/20582",
    ),
    Repair("sparse-overflow", overflow_is_missed, check_every_row),
    Repair("python-numbers", learning_rate_is_unreadable, read_numbers_of_replicated_variables),
)
