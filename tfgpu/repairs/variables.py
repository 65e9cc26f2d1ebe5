"""Python numbers of variables on several devices: `float(model.optimizer.learning_rate)`, as callbacks use it."""

import keras

from tfgpu.compat.patch import wrap
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


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


def learning_rate_is_unreadable() -> bool:
    """Whether Python cannot read a variable on several devices."""
    with probing.mirrored().scope():
        optimizer = keras.optimizers.SGD(0.5)
    try:
        return float(optimizer.learning_rate) != 0.5
    except TypeError:
        return True


REPAIRS = (
    Repair(
        name="python-numbers",
        fault="`float(model.optimizer.learning_rate)`, which callbacks use, raises under replicas",
        issue="",
        probe=learning_rate_is_unreadable,
        apply=read_numbers_of_replicated_variables,
    ),
)
