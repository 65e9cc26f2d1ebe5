"""Whether parts of a batch say what the whole says: outputs by rows, sums, and state by the rule for layers.

And what can be compared of the outputs of a step that is tried.
"""

from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core.row_mixing.isolation import TrialShard
from tfgpu.core.row_mixing.step_recorder import ROWS
from tfgpu.core.state import layer_state

CLOSE = 2e-5
"""By how much of the largest number two may differ that are as good as equal."""
_CLOSE_IN_16_BITS = {"float16": 4e-3, "bfloat16": 3e-2}


def close_for(dtypes: Iterable[str | None]) -> float:
    """`CLOSE` for layers that compute in these dtypes."""
    return max((_CLOSE_IN_16_BITS.get(dtype, CLOSE) for dtype in dtypes), default=CLOSE)


def agrees(
    variable, start, whole, parts: list, shares: list[float], *, noted: layer_state.Noted, close: float
) -> bool:
    """Whether the rule for a layer's state (`layer_state`) makes of the parts what one device has."""
    if whole.dtype.kind not in "fiub":
        return True
    if id(variable) in noted.inside:
        return all(is_close(whole, each, close) for each in parts)
    if variable.aggregation == "sum":
        is_sum = id(variable) in noted.added or variable.synchronization == "on_read"
        total = start + sum(each - start for each in parts) if is_sum else sum(parts)
        return is_close(whole, total, close, *parts)
    if all(is_close(whole, each, close) for each in parts):
        return True
    if variable.synchronization == "on_read" or variable.aggregation == "only_first_replica":
        return False
    return whole.dtype.kind == "f" and is_close(whole, weighed(parts, shares), close, *parts)


def has_rows(whole: np.ndarray, rows: int) -> bool:
    return bool(whole.ndim) and whole.shape[0] > 0 and whole.shape[0] % rows == 0


def weighed(values: list[np.ndarray], shares: list[float]) -> np.ndarray:
    return sum(value * share for value, share in zip(values, shares, strict=True))


def largest(values: list[np.ndarray | None]) -> np.ndarray:
    return np.array(max((np.abs(each).max(initial=0.0) for each in values if each is not None), default=0.0))


def are_rows(
    whole: np.ndarray, parts: list[np.ndarray], places: list[TrialShard], close: float, *besides: np.ndarray
) -> bool:
    """Whether the parts' rows are the whole's, or all of them are the whole, which then has no rows."""
    counts = [shard.count for shard in places]
    if not whole.ndim or any(not part.ndim for part in parts):
        return all(is_close(whole, part, close, *besides) for part in parts)
    each, rest = divmod(whole.shape[0], places[0].total)
    shapes = [(each * count, *whole.shape[1:]) for count in counts]
    if each and not rest and [part.shape for part in parts] == shapes:
        together = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if is_close(whole, together, close, *besides):
            return True
        by_block = [part.reshape(each, count, *part.shape[1:]) for part, count in zip(parts, counts, strict=True)]
        return each > 1 and is_close(whole, np.concatenate(by_block, 1).reshape(whole.shape), close, *besides)
    return all(is_close(whole, part, close, *besides) for part in parts)


def is_close(one: np.ndarray, other: np.ndarray, by: float, *besides: np.ndarray) -> bool:
    """Whether both are as good as equal; `besides` are numbers that they come from."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return bool(np.all(one == other))
    one, other = one.astype("float64"), np.asarray(other, "float64")
    size = max((np.abs(each[np.isfinite(each)]).max(initial=0.0) for each in (one, other, *besides)), default=0.0)
    with np.errstate(invalid="ignore"):
        is_near = np.abs(one - other) <= by * size + 1e-9
    return bool(np.all(is_near | (one == other) | (np.isnan(one) & np.isnan(other))))


def is_finite(value: np.ndarray) -> bool:
    """Whether all numbers are finite."""
    return value.dtype.kind != "f" or bool(np.isfinite(value).all())


def array(tensor: tf.Tensor) -> np.ndarray:
    if tensor.dtype in (tf.bfloat16, tf.float16):
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tf.convert_to_tensor(tensor).numpy())


class NoNumbers(Exception):
    """A step returns what cannot be compared, nor cut by rows."""


def as_numbers(outputs: object) -> list[np.ndarray]:
    """The numbers that a step has returned, from any structure.

    Raises:
        NoNumbers: there are texts, ragged or sparse tensors.
    """
    leaves = keras.tree.flatten(outputs)
    if any(isinstance(each, (tf.RaggedTensor, tf.SparseTensor)) or _is_text(each) for each in leaves):
        raise NoNumbers("it returns texts, ragged or sparse tensors")
    return [np.asarray(keras.ops.convert_to_numpy(leaf), "float64") for leaf in leaves]


def grows_with_rows(whole: np.ndarray, parts: list[np.ndarray], sizes: list[int]) -> bool:
    """Whether an output has rows of the batch: its first axis grows with the rows that the step got.

    Args:
        whole: the output for `ROWS` rows.
        parts: the same output for other numbers of rows.
        sizes: those numbers.

    Example:
        >>> grows_with_rows(np.zeros(7), [np.zeros(3), np.zeros(4)], [3, 4])
        True
        >>> grows_with_rows(np.zeros(7), [np.zeros(7)], [3])
        False
    """
    pairs = zip(parts, sizes, strict=True)
    return whole.ndim > 0 and all(
        part.ndim == whole.ndim and len(part) * ROWS == len(whole) * size for part, size in pairs
    )


def can_travel(spec: object) -> bool:
    """Whether rows of these specs can go from one replica to another."""
    return all(
        each is None or (isinstance(each, tf.TensorSpec) and each.dtype != tf.string) for each in tf.nest.flatten(spec)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (tf.is_tensor(value) and value.dtype == tf.string)
