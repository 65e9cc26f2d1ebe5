"""Runs a user's function on the side, as a replica that holds some of the rows: what it does leaves no trace.

A trial runs while a step is traced. It gets a thread of its own, with no graph, no gradient tape and no scope around
it, and runs eagerly. Keras variables are read from a stateless scope, which keeps what is assigned; TensorFlow's own
variables, attributes of layers and the state of random generators are put back.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import tensorflow as private_tf
from tfgpu.core import replication, step_context
from tfgpu.core.step_context import RowRange, Step

_SEED = 7_340_033


@dataclass(frozen=True)
class Part:
    """Rows of a drawn batch: as a slice, and as the range that a replica would hold."""

    first: int
    count: int
    total: int

    def of(self, table: np.ndarray | tf.Tensor):
        """These rows of a table that has one or several for each row of the batch."""
        each = int(table.shape[0]) // self.total
        return table[self.first * each : (self.first + self.count) * each]

    @property
    def share(self) -> float:
        return self.count / self.total

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In the block this thread is a replica that holds these rows and meets no other."""
        rows = RowRange(*(tf.constant(number, tf.int32) for number in (self.count, self.first, self.total)))
        facts = Step(rows, tf.constant(self.share, tf.float32), local_forward=True)
        with step_context.scope(step=facts, keeps_own_state=True):
            yield


def parts_of(rows: int) -> tuple[Part, Part, Part]:
    """A batch of so many rows, whole and in two parts, neither of an even length if the rows are."""
    first = (rows - 1) // 2
    return Part(0, rows, rows), Part(0, first, rows), Part(first, rows - first, rows)


def run(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread that knows nothing of the step that is traced; returns or raises what it does."""
    if step_context.current().is_trying:
        return function()
    context, state, found = replication.replica_context(), private.copied_thread_state(), []

    def work():
        private.thread_state().update(state)
        try:
            replica = contextlib.nullcontext()
            if context is not None:
                replica = tf.distribute.ReplicaContext(context.strategy, context.replica_id_in_sync_group)
            with step_context.scope(is_trying=True), kept_draws(), replica, tf.device("CPU:0"):
                found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    with tf.init_scope():
        thread = threading.Thread(target=work, name="tfgpu trial")
        thread.start()
        thread.join()
    ((result, error),) = found
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def kept_draws(seed: int = 0) -> Iterator[None]:
    """What draws random numbers within leaves those that come afterward as they would be."""
    python, numpy, tensorflow = random.getstate(), np.random.get_state(), private_tf.eager_random()
    before = tensorflow.getstate() if tensorflow is not None else None
    if tensorflow is not None:
        tensorflow.seed(_SEED + seed)  # TensorFlow goes on where an operation has the seed of an earlier one
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if tensorflow is not None:
            tensorflow.setstate(before)


@contextlib.contextmanager
def kept_attributes(things: Iterable[object]) -> Iterator[None]:
    """Puts back the attributes of objects, and what their lists, dicts and sets hold."""
    before = [
        (vars(thing), {name: (value, _content(value)) for name, value in vars(thing).items()}) for thing in things
    ]
    try:
        yield
    finally:
        for attributes, was in before:
            for name in [name for name in attributes if name not in was]:
                del attributes[name]
            for name, (value, content) in was.items():
                attributes[name] = value
                if content is not None:
                    _refill(value, content)


def tensors_in(things: Iterable[object]) -> dict[tuple[int, str], tf.Tensor]:
    """The tensors that objects hold directly in attributes, by object's place and name."""
    return {
        (at, name): value
        for at, thing in enumerate(things)
        for name, value in vars(thing).items()
        if tf.is_tensor(value) and not isinstance(value, (tf.Variable, keras.Variable, tf.distribute.DistributedValues))
    }


def _content(value: object) -> object | None:
    base = _container(value)
    return None if base is None else base(value)


def _container(value: object) -> type | None:
    """Which of Python's containers a value is; TensorFlow's stand-ins for them are none."""
    return next((base for base in (dict, list, set) if base in type(value).__mro__), None)


def _refill(value: Any, content: Any) -> None:
    """Bypasses Keras's tracking of what a layer's containers hold."""
    base = _container(value)
    base.clear(value)
    if base is list:
        list.extend(value, content)
    else:
        base.update(value, content)
