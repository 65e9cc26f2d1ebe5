"""How much an optimizer must see to update a number: that number's own state, the whole variable, or all variables.

An optimizer is tried: it trains a small variable whole and in two pieces, and two small variables together and alone.
"""

import enum
import functools
import threading
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import optimizers
from tfgpu.optim import parameter_groups


class Sees(enum.Enum):
    """What the update of one number depends on.

    Attributes:
        NUMBER: the number, its gradient and its slots, as in Adam. Pieces of variables can be updated apart.
        VARIABLE: other numbers of the variable or its shape, as in Lamb. Whole variables can be updated apart.
        ALL: other variables, or state of the optimizer that belongs to no variable.
    """

    NUMBER = "number"
    VARIABLE = "variable"
    ALL = "all"


def what_it_sees(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> Sees:
    """What an optimizer, without loss scaling and no `MultiOptimizer`, must see to update a variable.

    Args:
        optimizer: built or not.
        variable: the whole variable.
    """
    if isinstance(optimizer, keras.optimizers.Muon) and optimizers.uses_adamw(optimizer, variable):
        return Sees.NUMBER
    with tf.init_scope():  # a rate is a variable, which has no value in a graph
        config = _Config(optimizer.get_config())
    return _tried(type(optimizer), config)


class _Config(dict):
    """A configuration that a cache can compare."""

    def __hash__(self):
        return hash(repr(self))

    def __eq__(self, other):
        return repr(self) == repr(other)


@functools.lru_cache(maxsize=64)
def _tried(cls: type, config: _Config) -> Sees:
    found: dict = {}

    def run():  # in a thread of its own: without a strategy, a graph or Keras's scopes
        trial = _Trial(cls, config)
        try:
            found["sees"] = trial.sees()
        except Exception:  # whatever a user's class raises on small variables; it may work on those of the model
            found["sees"] = Sees.ALL

    thread = threading.Thread(target=run, name="tfgpu-try-optimizer")
    thread.start()
    thread.join()
    return found["sees"]


class _Trial:
    """Trains small variables.

    Args:
        cls: the optimizer's class.
        config: its configuration.
    """

    def __init__(self, cls: type, config: dict):
        self._cls, self._config = cls, dict(config) | {"learning_rate": 0.01}
        named = ("clipnorm", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
        self._config |= dict.fromkeys(named)  # what is done to gradients before the update, and around it
        draw = np.random.default_rng(0)
        self._kernel = draw.normal(size=(4, 6)).astype("float32"), draw.normal(size=(3, 4, 6)).astype("float32")
        self._bias = draw.normal(size=5).astype("float32"), 3 * draw.normal(size=(3, 5)).astype("float32")

    def sees(self) -> Sees:
        whole = self._trained(self._kernel)
        pieces = [self._trained(self._kernel, lambda array, at=at: np.split(array.reshape(-1), 2)[at]) for at in (0, 1)]
        if _is_close(whole[0].reshape(-1), np.concatenate([piece[0] for piece in pieces])):
            return Sees.NUMBER
        together, alone = self._trained(self._kernel, self._bias), [*whole, *self._trained(self._bias)]
        is_apart = together is not None and all(map(_is_close, together, alone))
        return Sees.VARIABLE if is_apart else Sees.ALL

    def _trained(self, *given) -> list[np.ndarray]:
        """The variables after three steps.

        Args:
            given: values with the gradients of each step; last perhaps a function that cuts a piece of each.
        """
        piece_of: Callable = given[-1] if callable(given[-1]) else lambda array: array
        given = [each for each in given if not callable(each)]
        trained = [keras.Variable(piece_of(value), name=f"kernel_{at}") for at, (value, _) in enumerate(given)]
        optimizer = self._cls.from_config(dict(self._config))
        optimizer.build(trained)
        before = self._state_of_no_variable(optimizer)
        is_even = all(np.ptp(np.asarray(slot, "float64")) == 0 for slot in _slots(optimizer))
        for step in range(3):
            optimizer.apply([tf.constant(piece_of(gradients[step])) for _, gradients in given], trained)
        after = self._state_of_no_variable(optimizer)
        found = [variable.numpy() for variable in trained]
        if len(given) > 1 and not (is_even and all(map(np.array_equal, before, after))):
            return [np.full_like(value, np.nan) for value in found]  # equals nothing
        return found

    @staticmethod
    def _state_of_no_variable(optimizer) -> list[np.ndarray]:
        _, rest = parameter_groups.slots_by_variable(optimizer)
        counted = {id(optimizers.iterations(optimizer)), id(optimizers.learning_rate(optimizer))}
        return [np.array(variable.numpy()) for variable in rest if id(variable) not in counted]


def _slots(optimizer) -> list[np.ndarray]:
    found, _ = parameter_groups.slots_by_variable(optimizer)
    return [slot.numpy() for slots in found.values() for slot in slots]


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-6)
