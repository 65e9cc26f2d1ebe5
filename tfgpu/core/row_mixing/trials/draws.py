"""Numbers that are drawn in the place of a step's own, and the driver of a trial: one draw after another is judged."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.state.python_state import TakesElements

UNKNOWN, SHORT = 8, 8
"""The length of an axis that is not known, and of a long one that is cut."""
SMALL, LARGEST = 1 << 18, 1 << 24
"""Numbers of all rows up to which no axis is cut, and up to which there is a trial."""
_SMALL_ROW, _CLOSE_ROW = 0.005, 0.02
"""The size of a drawn row that is small, and the distance of one that is close to another; of the others both are 1."""
SIZES = (1e-3, 1e3), (0.05, 4.0), (1e3, 1e3)
"""Of the rows of one part and of the other's; the second where the first tell nothing, or are too far apart.

The last are for what is added up: that both parts count something shows where both meet a bound.
"""
_MOST_LOOKED_AT = 1 << 20  # numbers of a variable up to which they are looked at
NONES = (-1, -100, 255)
"""Labels that stand for "none"."""
NOT_FINITE = "it gives no finite number for drawn ones"
TOO_MANY = "too many numbers for a trial"

Draw = TypeVar("Draw")
Verdict = TypeVar("Verdict")


@dataclass(frozen=True)
class Judged(Generic[Verdict]):
    """What came of a trial.

    Attributes:
        verdict: None where no draw told anything.
        why: the first reason for which a draw told nothing; None where all did.
    """

    verdict: Verdict | None
    why: str | None


def judged(
    draws: Iterable[Draw],
    judge: Callable[[Draw], Verdict | None],
    *,
    is_last: Callable[[Verdict], bool] = lambda verdict: True,
    passing: tuple[type[Exception], ...] = (Meets,),
) -> Judged[Verdict]:
    """Judges draw after draw; an error is the user's code's, on numbers that are none of its own, and the next follows.

    Args:
        draws: anything.
        judge: from a draw to a verdict; None where the numbers that came out are not finite.
        is_last: whether a verdict ends the trial; else the first one counts if none ends it.
        passing: errors that are not the user's code's, and are raised.

    Example:
        >>> judged([0, 2], lambda number: 1 / number)
        Judged(verdict=0.5, why='ZeroDivisionError: division by zero')
    """
    found, why = None, None
    for draw in draws:
        try:
            verdict = judge(draw)
        except (*passing, TakesElements):
            raise
        except Exception as error:
            why = why or told(error)
            continue
        if verdict is None:
            why = why or NOT_FINITE
        elif is_last(verdict):
            return Judged(verdict, why)
        found = verdict if found is None else found
    return Judged(found, why)


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def values(source: np.random.Generator, shape: tuple[int, ...], how: str, *, below: int = 2) -> np.ndarray:
    """Draws an array.

    Args:
        source: of random numbers.
        shape: of the array.
        how: "normal", "wide" (normal, twice as far from 0), "positive" (0.05 to 0.95) or "whole". With the first two,
            every third row is small, and the last one is close to the first: if all were large and far apart, a softmax
            over rows would return each row itself, as if it mixed nothing.
        below: whole numbers are below it.
    """
    if how == "whole":
        return source.integers(0, below, shape)
    if how == "positive":
        return source.uniform(0.05, 0.95, shape)
    found = (1 + (how == "wide")) * source.normal(size=shape)
    if np.ndim(found) and len(found) > 3:
        found[2::3] *= _SMALL_ROW
        found[-1] = found[0] + _CLOSE_ROW * found[-1]
    return found


def with_special(source: np.random.Generator, drawn: np.ndarray, number: float, rate: float) -> np.ndarray:
    """The array with a special number at some places."""
    return np.where(source.random(drawn.shape) < rate, number, drawn)


def with_specials(source: np.random.Generator, drawn: np.ndarray, numbers: Sequence[float], rate: float) -> np.ndarray:
    """The array with special numbers at some places, each at one at least."""
    found = np.where(source.random(drawn.shape) < rate, source.choice(numbers, drawn.shape), drawn)
    for place, number in zip(source.permutation(drawn.size), numbers, strict=False):
        found.reshape(-1)[place] = number
    return found


def marked(source: np.random.Generator, tensor: tf.Tensor, numbers: Sequence[float]) -> tf.Tensor:
    """A tensor with special numbers in every third row, and at some other places."""
    values = with_special(source, np.asarray(tf.cast(tensor, tf.float32)), numbers[0], 0.15)
    for row in range(1, len(values), 3):
        values[row] = numbers[row // 3 % len(numbers)]
    return cast(values, tensor.dtype)


def sized(tensor: tf.Tensor, cut: int, sizes: tuple[float, float]) -> tf.Tensor:
    """A tensor with its rows before `cut` times the first size, and the others times the second.

    The sums of both get different signs, where there are numbers of both. What asks whether numbers are larger than a
    bound, or positive, gets another answer for one of the parts than for the whole.

    Example:
        >>> sized(tf.constant([1.0, 2.0, -1.0]), 1, (0.5, 10.0)).numpy()
        array([  0.5, -20. ,  10. ], dtype=float32)
    """
    small, large = sizes
    if tensor.dtype.is_floating and bool(tf.reduce_any(tensor < 0)):
        first, second = (float(tf.reduce_sum(tf.cast(rows, tf.float32))) for rows in (tensor[:cut], tensor[cut:]))
        small, large = math.copysign(small, first), -math.copysign(large, second)
    each = np.where(np.arange(len(tensor)) < cut, small, large).reshape(-1, *[1] * (tensor.shape.rank - 1))
    return tensor * tf.cast(each, tensor.dtype)


def nudged(tensor: tf.Tensor, by: float, marks: Sequence[float] = ()) -> tf.Tensor:
    """A tensor whose floats are moved by a part of them, as rounding may do, but for those that stand for "none"."""
    if not tensor.dtype.is_floating:
        return tensor
    signs = np.random.default_rng(1).choice((-1.0, 1.0), tuple(tensor.shape))
    return keeping(tensor, tensor * tf.cast(1 + by * signs, tensor.dtype), marks)


def keeping(tensor: tf.Tensor, moved: tf.Tensor, marks: Sequence[float]) -> tf.Tensor:
    """The second tensor, with the numbers that the first one has where these are marks."""
    for mark in marks:
        moved = tf.where(tensor == tf.cast(mark, tensor.dtype), tensor, moved)
    return moved


def cast(drawn: np.ndarray, dtype: str | tf.DType) -> tf.Tensor:
    """A tensor of these numbers."""
    return tf.cast(tf.convert_to_tensor(drawn), dtype)


def given_rows(arguments: dict, spec: object, rows: int) -> object | None:
    """The first rows of the arrays that `fit` or `evaluate` was called with, as the step gets them.

    Args:
        arguments: of the call, by name.
        spec: of what the step gets.
        rows: how many.

    Returns:
        Tensors in the structure of `spec`; None where the data are no arrays, too few, or not what the step gets.
    """
    data = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    leaves, specs = tf.nest.flatten([each for each in data if each is not None]), tf.nest.flatten(spec)
    known = np.ndarray, tf.Tensor
    if not leaves or len(leaves) != len(specs) or not all(isinstance(each, known) for each in leaves):
        return None
    pairs = list(zip(leaves, specs, strict=True))
    if not all(isinstance(each, tf.TensorSpec) and _has_rows_for(leaf, each, rows) for leaf, each in pairs):
        return None
    return tf.nest.pack_sequence_as(spec, [tf.cast(leaf[:rows], each.dtype) for leaf, each in pairs])


def _has_rows_for(array: np.ndarray | tf.Tensor, spec: tf.TensorSpec, rows: int) -> bool:
    """Whether an array has so many rows, and the spec is one of its rows."""
    if not array.ndim or len(array) < rows or spec.shape.rank != array.ndim or tf.as_dtype(array.dtype) == tf.string:
        return False
    return spec.shape[1:].is_compatible_with(array.shape[1:])


def drawn_weight(seed: int, variable: keras.Variable, shape: tuple[int, ...]) -> tf.Tensor:
    """What stands in for a weight: numbers of the size that initializers give, in its dtype."""
    dtype = variables.storage_dtype(variable)
    if len(shape) < 2:
        return tf.cast(tf.random.stateless_uniform(shape, [seed, 0], 0.2, 1.0), dtype)
    return tf.cast(tf.random.stateless_normal(shape, [seed, 1], stddev=math.prod(shape[:-1]) ** -0.5), dtype)


def stand_in(at: int, variable: keras.Variable) -> tf.Tensor:
    """A variable's value; one whose numbers are all alike, which may hide what depends on it, is moved.

    Of a variable that is in pieces, which reading would bring together, drawn numbers stand in.
    """
    if isinstance(variable, variables.VirtualVariable):
        return drawn_weight(at, variable, tuple(variable.shape))
    value = tf.convert_to_tensor(variables.local_value(variables.held(variable)))
    size = math.prod(value.shape)
    if not value.dtype.is_floating or size > _MOST_LOOKED_AT or not size:
        return tf.identity(value)
    found = np.asarray(tf.cast(value, tf.float64))
    if found.min() != found.max():
        return tf.identity(value)
    noise = np.random.default_rng(size).uniform(0.1, 0.6, found.shape)
    return tf.cast(tf.constant(found + noise), value.dtype)
