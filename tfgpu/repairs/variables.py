"""Python numbers of variables that lie on several devices: `float(model.optimizer.learning_rate)`, as callbacks ask."""

from keras.src.backend.common.variables import Variable

from tfgpu.compat.patch import wrap


def read_numbers_of_replicated_variables() -> None:
    """Lets `float` and `int` read a Keras variable under any strategy, as they do on one device.

    Keras hands on to the variable within, and TensorFlow's distributed ones have no `__float__` and no `__int__`; both
    have `numpy`. In a graph, where no variable has a value yet, TensorFlow's own error stays.
    """

    @wrap(Variable, "__float__")
    def as_float(stock, self):
        return stock(self) if self.ndim > 0 or hasattr(type(self.value), "__float__") else float(self.value.numpy())

    @wrap(Variable, "__int__")
    def as_int(stock, self):
        return stock(self) if self.ndim > 0 or hasattr(type(self.value), "__int__") else int(self.value.numpy())
