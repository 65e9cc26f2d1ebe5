"""Keeps what a tried step assigns, in place of its variables, and tells what it has made and assigned."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.compat.keras import StatelessScope
from tfgpu.core import step_context
from tfgpu.core.state import layer_state

LATER, BETWEEN = 97, 0.7
"""What is added to counters, and what numbers are that are 0 or 1, as after many steps."""
_OF_METRICS = {"update_state", "result", "reset_state", "__init__", "build"}


@dataclass(frozen=True)
class Assigned:
    """A variable to which a step would assign, of Keras or of TensorFlow.

    Attributes:
        path: its name.
        aggregation: of what replicas assign to it, in Keras's words.
        before, after: its values.
        owner: what it belongs to, of a variable that the step has made itself.
        is_plain: it is one of TensorFlow's own.
        is_own: each replica keeps its value (`synchronization="on_read"`).
        is_added: something was added to it, in place of a value assigned.
        is_inside: it was assigned in a condition or a loop, where replicas cannot put their values together.
    """

    path: str
    aggregation: str
    before: np.ndarray
    after: np.ndarray
    owner: object = None
    is_plain: bool = False
    is_own: bool = False
    is_added: bool = False
    is_inside: bool = False


class Apart(StatelessScope):
    """Nothing that a step assigns to Keras's variables stays.

    Args:
        plain: TensorFlow's own variables that the step can reach.
        is_later: counters are read as after many steps, and scalars that are 0 or 1 as another number: a loss that is
            warmed up has no weight in the first step, and a share of rows that falls begins with all. Of TensorFlow's
            own, until `restore`.
        beyond: a number of steps that code compares its counters with, which they are beyond then; 0: none.

    Attributes:
        made: Keras variables that the step has made.
        own_reads: paths of metrics' variables that were read by code of no metric: each replica has values of its own.
        may_count: the step has read a counter, or can reach a number of TensorFlow's that may be one.
    """

    def __init__(self, plain: Sequence[tf.Variable] = (), *, is_later: bool = False, beyond: int = 0):
        super().__init__(collect_losses=True)
        self._is_later, self._is_holding, self._beyond = is_later, False, beyond
        self.made: list[keras.Variable] = []
        self.own_reads: set[str] = set()
        self._variables, self._begun, self._held = {}, {}, {}
        self._copies = [(copy, variables.local_value(copy)) for each in plain for copy in variables.copies(each)]
        numbers = [(copy, value) for copy, value in self._copies if _is_number(copy)]
        self.may_count = bool(numbers)
        for copy, value in numbers if is_later else ():
            copy.assign(later(value, beyond))
        self._plain = [(each, variables.local_value(each)) for each in plain]
        self._made_plain: list[tuple[tf.Variable, tf.Tensor]] = []

    def begin_with(self, variable: keras.Variable, value: tf.Variable) -> None:
        """The step sees another value of a variable than the one that it has."""
        self.state_mapping[id(variable)] = value
        self._begun[id(variable)] = tf.identity(value)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes TensorFlow's own variables that are made in the block."""

        def create(make: Callable, **options) -> tf.Variable:
            variable = make(**options)
            if not self._is_holding:
                self._made_plain.append((variable, variables.local_value(variable)))
            return variable

        with tf.variable_creator_scope(create):
            yield

    def get_current_value(self, variable: keras.Variable) -> object | None:
        """The value that the step would see, also where nothing was assigned: Keras gives it to regularizers."""
        found = super().get_current_value(variable)
        if variable.synchronization == "on_read" and not _is_in_metric():
            self.own_reads.add(variable.path)
        self.may_count |= is_counter(variable)
        if found is None and self._is_later and is_counter(variable):
            self.begin_with(variable, self._as_variable(later(variables.held(variable), self._beyond)))
            return super().get_current_value(variable)
        return variables.held(variable) if found is None else found

    def add_update(self, update: tuple) -> None:
        """Keeps what is assigned: to weights that train as a variable, of which a tape can take the gradient."""
        variable, value = update
        self._variables[id(variable)] = variable
        if variable.trainable and step_context.current().recorder is not None:
            value = self._as_variable(value)
            self._held.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))

    def _as_variable(self, value: tf.Tensor) -> tf.Variable:
        self._is_holding = True
        try:
            return tf.Variable(value, trainable=value.dtype.is_floating)
        finally:
            self._is_holding = False

    def values_of(self, source: object) -> list:
        """What a tape may have read of a variable: its own value, then each that was assigned to it."""
        held = self._held.get(id(source))
        return [source] if held is None else [variables.held(source), *held]

    def made_variables(self) -> list[keras.Variable | tf.Variable]:
        """What the step has made: variables of Keras, then those of TensorFlow that are none of Keras's."""
        of_keras = {id(variables.held(each)) for each in self.made}
        return [*self.made, *(each for each, _ in self._made_plain if id(each) not in of_keras)]

    def assigned(self, noted: layer_state.Noted) -> dict[object, Assigned]:
        """Variables by `id`, or by the number of one that the step has made, with the values that they would have."""
        keys = {id(each): ("made", number) for number, each in enumerate(self.made_variables())}
        found = {}
        for key, each in self._variables.items():
            owner = ("made", each.path.rpartition("/")[0]) if key in keys else None
            before, after = self._begun.get(key, variables.held(each)), self.get_current_value(each)
            how = {"is_added": key in noted.added, "is_inside": key in noted.inside}
            how |= {"owner": owner, "is_own": each.synchronization == "on_read"}
            found[keys.get(key, key)] = Assigned(each.path, each.aggregation, _array(before), _array(after), **how)
        of_keras = {id(variables.held(each)) for each in self.made}
        for each, value in [*self._plain, *(pair for pair in self._made_plain if id(pair[0]) not in of_keras)]:
            before, after = _array(value), _array(variables.local_value(each))
            if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                aggregation = each.aggregation.name.lower()
                found[keys.get(id(each), id(each))] = Assigned(each.name, aggregation, before, after, is_plain=True)
        return found

    def restore(self) -> None:
        """Gives TensorFlow's own variables the values that they had when this began."""
        for each, value in self._copies:
            each.assign(value)

    def with_one_copy(self) -> list[int]:
        """TensorFlow's own variables that the step has not made, and of which there is one copy, by `id`."""
        return [id(each) for each, _ in self._plain if not isinstance(each, tf.distribute.DistributedValues)]


def _is_in_metric() -> bool:
    """Whether a method that a metric has by Keras's interface is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _OF_METRICS and isinstance(frame.f_locals.get("self"), keras.Metric):
            return True
        frame = frame.f_back
    return False


def is_counter(variable: keras.Variable) -> bool:
    """Whether it is a scalar that a step may count with, or that a callback raises; not one of a metric."""
    return _is_number(variable) and not (variable.trainable or variable.synchronization == "on_read")


def _is_number(variable: keras.Variable | tf.Variable) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return (dtype.is_integer or dtype.is_floating) and tf.TensorShape(variable.shape).rank == 0


def later(value: tf.Variable | tf.Tensor, beyond: int = 0) -> tf.Tensor:
    """A counter's value after many steps: beyond a number that code compares it with, if there is one.

    Example:
        >>> [later(tf.constant(number)).numpy().item() for number in (2, 3.0)], later(tf.constant(1.0), 500).numpy()
        ([99, 3.0], np.float32(598.0))
    """
    now = tf.convert_to_tensor(value)
    if now.dtype.is_integer or beyond:
        return now + tf.cast(LATER + beyond, now.dtype)
    return tf.where((now == 0) | (now == 1), tf.cast(BETWEEN, now.dtype), now)


def _array(value: object) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(value).numpy())
