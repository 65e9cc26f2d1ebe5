"""What a Keras variable holds."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state

from tfgpu.compat import slots


def held(variable: keras.Variable) -> tf.Variable | None:
    """The TensorFlow variable (or the replicas' copies of it) of a Keras variable; None while it is not initialized.

    `variable.value` may be a cast copy of it, and can never be assigned.

    Example:
        >>> float(held(keras.Variable(1.0)))
        1.0
    """
    return variable._value


def set_held(variable: keras.Variable, value: tf.Variable | None) -> None:
    """Replaces the TensorFlow variable of a Keras variable; None frees its memory."""
    variable._value = value


def set_storage_dtype(variable: keras.Variable, dtype: str) -> None:
    """Sets the dtype that a Keras variable says it is kept in."""
    variable._dtype = dtype


def set_shape(variable: keras.Variable, shape: Sequence[int]) -> None:
    """Sets the shape that a Keras variable says it has."""
    variable._shape = tuple(shape)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside the block new Keras variables take no memory: each is given its initial value by `take_value`."""
    before = list(global_state.get_global_attribute("uninitialized_variables") or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:  # otherwise the next scope that ends would initialize them all
        global_state.set_global_attribute("uninitialized_variables", before)


def is_deferred(variable: keras.Variable) -> bool:
    """Whether a variable was made in `deferred` and has no value yet."""
    return variable._value is None and variable._initializer is not None


@contextmanager
def lent(wanted: Iterable[keras.Variable]) -> Iterator[None]:
    """Inside the block variables that were made in `deferred` hold their initial values, in the host's memory."""
    waiting = [variable for variable in wanted if is_deferred(variable)]
    try:
        for variable in waiting:
            with tf.init_scope(), tf.device("CPU:0"):
                value = variable._initializer(variable._shape, dtype=variable._dtype)
                variable._value = tf.Variable(value, dtype=variable._dtype, trainable=variable._trainable)
        yield
    finally:
        for variable in waiting:
            variable._value = None
        if waiting:
            gc.collect()  # a function that was traced here keeps what it read until its cycles are collected


def take_value(variable: keras.Variable) -> np.ndarray:
    """A variable's value, which the variable holds no longer; of a deferred one its initial value."""
    if is_deferred(variable):
        with tf.init_scope(), tf.device("CPU:0"):
            value = np.asarray(variable._initializer(variable._shape, dtype=variable._dtype))
        variable._initializer = None
        return value
    value = np.asarray(variable._value.numpy())
    variable._value = None
    return value


def shaped_as(variable: keras.Variable, shape: Sequence[int]) -> AbstractContextManager[None]:
    """Inside the block a Keras variable says that it has another shape."""
    return slots.replaced(variable, _shape=tuple(shape))


def has_copies(variable: keras.Variable) -> bool:
    """Whether each replica has a copy of a Keras variable."""
    return isinstance(variable._value, tf.distribute.DistributedValues)


def local_copy(variable: keras.Variable) -> tf.Variable:
    """This replica's copy of a Keras variable, in its own dtype."""
    return own_copy(variable._value)


def own_copy(variable: tf.Variable) -> tf.Variable:
    """This replica's copy of a TensorFlow variable; the variable itself where there is one only."""
    is_spread = isinstance(variable, tf.distribute.DistributedValues)
    return variable._get_on_device_or_primary() if is_spread else variable


def copies(variable: tf.Variable) -> list[tf.Variable]:
    """All copies of a TensorFlow variable in this process; the variable itself where there is one only."""
    is_spread = isinstance(variable, tf.distribute.DistributedValues)
    return list(variable._values) if is_spread else [variable]


def local_value(variable: tf.Variable) -> tf.Tensor:
    """The value of this replica's copy of a TensorFlow variable, which later assignments do not change."""
    return tf.identity(own_copy(variable).read_value())


def read_by(op: tf.Operation) -> tf.Variable | None:
    """The variable (a replica's copy) that a `ReadVariableOp` in a function's graph reads; None if unknown."""
    handle, graph = op.inputs[0], op.graph
    known = {id(variable.handle): variable for variable in getattr(graph, "_watched_variables", ())}
    while hasattr(handle, "graph"):  # a nested graph captures the outer graph's placeholder
        captures = {id(inner): outer for outer, inner in getattr(handle.graph, "captures", ())}
        if id(handle) not in captures:
            return None
        handle = captures[id(handle)]
    return known.get(id(handle))


def initialize(variable: keras.Variable, value: object) -> None:
    """Creates the TensorFlow variable of a Keras variable again, in the current scope and on the current device."""
    variable._initialize(value)


def trainable_flag(variable: keras.Variable) -> bool:
    """Whether a Keras variable is trained, ignoring overrides in a subclass."""
    return variable._trainable


def set_trainable_flag(variable: keras.Variable, value: bool) -> None:
    """Sets whether a Keras variable is trained; its TensorFlow variable stays as it is."""
    variable._trainable = value


def storage_dtype(variable: keras.Variable) -> str:
    """The dtype in which a variable is kept, outside any autocast scope."""
    return variable._dtype


def autocasts(variable: keras.Variable) -> bool:
    """Whether a variable is read in the compute dtype of the layer that reads it."""
    return variable._autocast


def rename(variable: keras.Variable, path: str) -> None:
    """Sets a variable's path, by which optimizers and files identify it."""
    variable._path = path


CHECKPOINT_KEY = "VARIABLE_VALUE"
"""The key under which `tf.train.Checkpoint` stores a variable's value."""


class VirtualVariable(backend.Variable):
    """A Keras variable without a value of its own; a subclass defines in three methods where the value is.

    An existing variable becomes one by `variable.__class__ = Subclass`.
    """

    def read(self) -> tf.Tensor:
        """The value, in its storage dtype."""
        raise NotImplementedError

    def write(self, value: np.ndarray) -> None:
        """Replaces the value, outside replicas."""
        raise NotImplementedError

    def shared_name(self) -> str:
        """TensorFlow's name of the resource that is saved in its place."""
        raise NotImplementedError

    @property
    def value(self) -> tf.Tensor:
        return self._maybe_autocast(self.read())

    def _direct_assign(self, value) -> None:
        self.write(value.numpy())

    @property
    def _shared_name(self) -> str:
        return self.shared_name()

    def _serialize_to_tensors(self) -> dict:
        return {CHECKPOINT_KEY: tf.constant(self.numpy())}

    def _restore_from_tensors(self, restored_tensors: dict) -> None:
        self.write(restored_tensors[CHECKPOINT_KEY].numpy())


def shared_name(variable: keras.Variable) -> str:
    """TensorFlow's name of a variable's resource."""
    return variable.value._shared_name


def set_aggregation(variable: keras.Variable, aggregation: tf.VariableAggregation) -> None:
    """Sets how TensorFlow aggregates what replicas assign to an existing variable."""
    variable._value._aggregation = aggregation


def set_cross_replica_read(value: tf.Variable, read: Callable[[], tf.Tensor]) -> None:
    """Replaces how a distributed variable reads outside the replicas."""
    value._get_cross_replica = read


def cross_replica_value(value: tf.Variable) -> tf.Tensor:
    """What a distributed variable reads outside the replicas by default, ignoring `set_cross_replica_read`."""
    return type(value)._get_cross_replica(value)
