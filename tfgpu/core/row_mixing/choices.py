"""Choices of the user's about code that looks at the rows of a batch: `by_rows`, `on_all_rows`, `gather`, `unproven`.

A piece of a step (a loss, a metric, a layer, a `train_step`) gives each row its own number, or it is computed on all
rows. For Keras's own classes tfgpu knows which; everything else is tried on drawn rows. What is marked here is not
tried.
"""

import functools
import types
from collections.abc import Callable
from typing import TypeVar

import keras
import tensorflow as tf

from tfgpu.compat import keras as keras_private
from tfgpu.compat import slots, training
from tfgpu.core import batch_rows, replication, step_context
from tfgpu.core.row_mixing import row_sums
from tfgpu.errors import InputError, unknown

BY_ROWS, ON_ALL_ROWS = "by_rows", "on_all_rows"
UNPROVEN = ("gather", "refuse", "warn")

Thing = TypeVar("Thing")


def by_rows(thing: Thing) -> Thing:
    """Marks code that treats each row of a batch separately, or takes their mean; tfgpu then does not try it.

    Each replica computes it from its own rows, and nothing is sent. If the code does mix rows, the result differs from
    one device's.

    Args:
        thing: a function, or a class or an instance of a layer, loss, metric or model. Marking a class marks its
            subclasses.

    Returns:
        The same thing, so you can use this as a decorator. For something that cannot hold a mark, such as a bound
        method, a function that calls it.

    Raises:
        InputError: it cannot be called, such as a loss by its name.

    Example:
        >>> @by_rows
        ... def squares(y_true, y_pred):
        ...     return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        >>> of(squares)
        'by_rows'
    """
    return _marked(thing, BY_ROWS)


def on_all_rows(thing: Thing) -> Thing:
    """Marks code that mixes rows of a batch: it is computed on all rows, and tfgpu does not try it.

    Every replica gets the inputs of all replicas and computes what one device does.

    Args:
        thing: as for `by_rows`.

    Returns:
        As `by_rows`.

    Raises:
        InputError: it cannot be called, such as a loss by its name.

    Example:
        >>> @on_all_rows
        ... class Queue(keras.layers.Layer):
        ...     pass
        >>> of(Queue()), of(keras.layers.Dense(1))
        ('on_all_rows', None)
    """
    return _marked(thing, ON_ALL_ROWS)


def gather(x: tf.Tensor) -> tf.Tensor:
    """Gets the rows of the whole batch from a replica's rows, with one device's gradient.

    Use it in your own code that compares rows, in `fit` and in a hand-written `strategy.run`. Every replica must call
    it, outside `tf.cond` and loops. All replicas compute the same from the whole batch: if your loop sums gradients
    over replicas, divide the result by the number of replicas.

    Args:
        x: this replica's rows, [rows, ...], of any dtype but string; in `strategy.run`, of the batch that the first
            distributed argument holds.

    Returns:
        [rows of the batch, ...], in the batch's order; `x` itself on one device, and where replicas do not communicate
        (`tfgpu.strategies.averaging()`).

    Raises:
        InputError: a scalar; or a `strategy.run` without distributed arguments, or a condition, loop or tf.function in
            it, where replicas cannot communicate.

    Example:
        >>> gather(tf.constant([1.0, 2.0])).numpy()  # one device has all rows
        array([1., 2.], dtype=float32)
    """
    recorder = step_context.current().recorder  # no `:=`: AutoGraph, which comes here from a user's code, has none
    if recorder is not None and not recorder.parts:
        return x  # a step that is tried, which sees the whole batch if it is not by rows
    if step_context.current().is_trying:
        return row_sums.meetings().gathered(tf.convert_to_tensor(x))
    context = replication.replica_context()
    if context is None or context.num_replicas_in_sync == 1 or isinstance(x, keras.KerasTensor):
        return x
    x = tf.convert_to_tensor(x)
    if x.shape.rank == 0:
        raise InputError(
            "`tfgpu.gather` takes rows, [rows, ...]. Received: a scalar. Give it a tensor with a batch axis."
        )
    if not batch_rows.can_communicate():
        raise InputError(
            "`tfgpu.gather` needs all replicas, which cannot communicate here: in a `strategy.run` without distributed "
            "arguments, or in a tf.cond, a loop or a tf.function within one. Call it directly in the function that "
            "`strategy.run` runs, and give that the replicas' rows as arguments."
        )
    return row_sums.all_rows(x)


def of(thing: object) -> str | None:
    """What the user said of a function, class or instance: `"by_rows"`, `"on_all_rows"` or None.

    Example:
        >>> of(functools.partial(by_rows(lambda x, scale: scale * x), scale=2.0))
        'by_rows'
    """
    seen = set()
    while thing is not None and id(thing) not in seen:
        seen.add(id(thing))
        classes = thing.__mro__ if isinstance(thing, type) else (thing, *type(thing).__mro__)
        for each in classes:
            if (choice := slots.get(each, "rows_choice") if each is not object else None) is not None:
                return choice
        thing = _within(thing)
    return None


def choose_unproven(strategy: tf.distribute.Strategy, way: str) -> tf.distribute.Strategy:
    """Sets what becomes of code that cannot be tried; returns the strategy.

    Args:
        strategy: any.
        way: `"gather"`, `"refuse"` or `"warn"`; see `tfgpu.strategy`.

    Raises:
        InputError: another word.
    """
    if way not in UNPROVEN:
        raise unknown("unproven", way, UNPROVEN)
    slots.of(strategy).unproven = way
    return strategy


def unproven() -> str:
    """What becomes of code that cannot be tried, under the current strategy: `"gather"`, `"refuse"` or `"warn"`."""
    return slots.get(tf.distribute.get_strategy(), "unproven", UNPROVEN[0])


def _marked(thing: Thing, choice: str) -> Thing:
    if not callable(thing):
        raise InputError(
            f"`tfgpu.{choice}` takes a function, or a class or an instance of a layer, loss, metric or model. "
            f"Received: {thing!r}. Give it the function itself."
        )
    if isinstance(thing, types.MethodType):  # what it holds is its function's, of all objects
        thing = _as_function(thing)
    if (function := getattr(thing, "python_function", None)) is not None:  # a tf.function makes another for each object
        slots.of(function).rows_choice = choice
    try:
        slots.of(thing).rows_choice = choice
    except (AttributeError, TypeError):  # one of Python's own
        thing = _as_function(thing)
        slots.of(thing).rows_choice = choice
    return thing


def _as_function(thing: Callable) -> Callable:
    @functools.wraps(thing, updated=())
    def call(*args, **kwargs):
        return thing(*args, **kwargs)

    return call


def _within(thing: object) -> object | None:
    """The function that a partial, a method, a wrapper, a tf.function or a Keras loss or metric of one calls."""
    if isinstance(thing, functools.partial):
        return thing.func
    if isinstance(thing, types.MethodType):
        return thing.__func__
    if isinstance(thing, keras_private.LossFunctionWrapper):
        return thing.fn
    if isinstance(thing, keras_private.MeanMetricWrapper):
        return training.metric_function(thing)[0]
    if isinstance(thing, (type, keras.layers.Layer)):
        return None
    return getattr(thing, "python_function", None) or getattr(thing, "__wrapped__", None)
