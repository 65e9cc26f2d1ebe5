"""Whether parts of a batch say what the whole says: outputs by rows, sums, and state by the rule for layers.

And what can be compared of the outputs of a step that is tried.
"""

import dataclasses
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core.row_mixing.trials.isolation import TrialShard
from tfgpu.core.row_mixing.trials.step_recorder import ROWS, Recorder
from tfgpu.core.state import layer_state
from tfgpu.core.state.trial_scope import Assigned

CLOSE = 2e-5
"""By how much of the largest number two may differ that are as good as equal."""
_CLOSE_IN_16_BITS = {"float16": 4e-3, "bfloat16": 3e-2}
_CLOSE_FOR_BIASES = 1e-2
_TIMES_NOISE = 8.0  # how much more rounding may do to the parts than to another run of the whole
_ROUNDED = 2.0**-22  # of a number, by float32
_SMALL = 1e-2  # of the largest gradient: what is smaller is rounding


def close_for(dtypes: Iterable[str | None]) -> float:
    """`CLOSE` for layers that compute in these dtypes."""
    return max((_CLOSE_IN_16_BITS.get(dtype, CLOSE) for dtype in dtypes), default=CLOSE)


def agrees(variable, start, whole, parts: list, shares: list[float], *, noted: layer_state.Noted, close: float) -> bool:
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


def ways_together(variable: Assigned, found: list, shares: list[float]) -> dict[str, np.ndarray]:
    """What replicas may make of their values of a variable: a sum, an average or the same value."""
    ways = {"same": found[0]}
    if np.issubdtype(variable.after.dtype, np.floating):
        ways["average"] = weighed(found, shares)
    if variable.aggregation == "sum":
        ways["sum"] = variable.before + sum(value - variable.before for value in found)
    return ways


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


def are_rows_of_their_size(whole: np.ndarray, parts: list[np.ndarray], places: list[TrialShard], close: float) -> bool:
    """As `are_rows`, where each part is compared by the size of its own numbers: those of another may be far larger."""
    for part, place in zip(parts, places, strict=True):
        each, rest = divmod(whole.shape[0] if whole.ndim else 0, place.total)
        if not each or rest or part.shape != (each * place.count, *whole.shape[1:]):
            if not is_close(whole, part, close):
                return False
        elif not is_close(place.of(whole), part, close):
            blocks = whole.reshape(each, place.total, *whole.shape[1:])[:, place.first : place.first + place.count]
            if each == 1 or not is_close(blocks, part.reshape(blocks.shape), close):
                return False
    return True


def is_close(one: np.ndarray, other: np.ndarray, by: float, *besides: np.ndarray) -> bool:
    """Whether both are as good as equal; `besides` are numbers that they come from."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return bool(np.all(one == other))
    one, other = one.astype("float64"), np.asarray(other, "float64")
    return _are_near(one, other, by * _size(one, other, *besides) + 1e-9)


def are_close(values: list, others: list, again: list, close: float) -> bool:
    """Whether numbers are as good as equal, by the rounding that another run of the whole shows."""
    pairs = zip(values, others, strict=True)
    if any((a is None) != (b is None) or (a is not None and a.shape != b.shape) for a, b in pairs):
        return False
    values, others, again = (list(map(_numbers, each)) for each in (values, others, again))
    kept = [at for at, value in enumerate(values) if value is not None]
    # A bias's gradient is a sum over all places of an image, which TensorFlow's CPU kernel adds up one by one. What
    # mixes rows shows in the kernels' gradients, too.
    has_kernels = any(values[at].ndim > 1 for at in kept)
    largest = max((_size(values[at], others[at]) for at in kept), default=0.0)
    for at in kept:
        size = max(_size(values[at], others[at]), _SMALL * largest)
        with np.errstate(invalid="ignore"):
            noise = _size(values[at] - again[at]) if values[at].dtype.kind == "f" else 0.0
        by = _CLOSE_FOR_BIASES if has_kernels and values[at].ndim < 2 else close
        if not _are_near(values[at], others[at], max(max(by, close) * size, _TIMES_NOISE * noise)):
            return False
    return True


def _are_near(one: np.ndarray, other: np.ndarray, bound: float) -> bool:
    """Whether all numbers are equal, no numbers in both, or no further apart."""
    if one.dtype.kind not in "fiuc":
        return bool(np.all(one == other))
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
        if apart.max(initial=0.0) <= bound:  # not where one is no number
            return True
        return bool(np.all((one == other) | (np.isnan(one) & np.isnan(other)) | (apart <= bound)))


def is_finite(value: np.ndarray) -> bool:
    """Whether all numbers are finite."""
    return value.dtype.kind not in "fc" or bool(np.isfinite(_extent(value)) or np.isfinite(value).all())


def not_linear(none: Recorder, once: Recorder, run: Recorder, times: float, close: float) -> str | None:
    """What of a run with gradients so many times as large is not on the line through those with none and with one."""

    def line(none: np.ndarray, once: np.ndarray) -> np.ndarray:
        return none + times * (once - none)

    if not len(none.updates) == len(once.updates) == len(run.updates):
        return "the number of updates"
    for without, own, found in zip(none.updates, once.updates, run.updates, strict=True):
        expected = [a if a is None else line(a, b) for a, b in zip(without, own, strict=True)]
        if not are_close(found, expected, found, close):
            return "the gradients"
    for key, variable in run.assigned.items():
        if variable.after.dtype.kind not in "fiu":
            continue
        unchanged = dataclasses.replace(variable, after=variable.before)
        three = (each.assigned.get(key, unchanged).after for each in (none, once, run))
        without, own, found = (each.astype("float64") for each in three)
        if not is_close(found, line(without, own), close + times * _ROUNDED, without, own):
            return f"the variable {variable.path!r}"
    return None


def are_numbers(found: Recorder) -> bool:
    """Whether the gradients, logs and outputs of a run are finite, and no variable has become NaN, which hides all."""
    gradients = [each for update in found.updates for each in update if each is not None]
    hides = any(_has_nan(each.after) and not _has_nan(each.before) for each in found.assigned.values())
    return not hides and all(map(is_finite, [*gradients, *found.logs, *found.outputs]))


def _has_nan(value: np.ndarray) -> bool:
    numbers = _numbers(value)
    return numbers.dtype.kind == "f" and bool(np.isnan(numbers).any())


def array(tensor: tf.Tensor) -> np.ndarray:
    if tensor.dtype in (tf.bfloat16, tf.float16):
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tf.convert_to_tensor(tensor).numpy())


def in_float64(value: object) -> np.ndarray:
    """A tensor, a variable or a number in float64.

    Example:
        >>> in_float64(tf.constant(1.5, tf.bfloat16))  # NumPy alone fails here
        array(1.5)
    """
    is_tensor = tf.is_tensor(value) and not isinstance(value, keras.Variable)  # whose dtype is a text
    value = value if is_tensor else keras.ops.convert_to_numpy(value)
    if tf.is_tensor(value) and value.dtype.is_floating and value.dtype.size < 4:
        value = tf.cast(value, tf.float64)
    return np.asarray(keras.ops.convert_to_numpy(value), "float64")


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
    return [in_float64(leaf) for leaf in leaves]


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
    return whole.ndim > 0 and all(
        part.ndim == whole.ndim and len(part) * ROWS == len(whole) * size
        for part, size in zip(parts, sizes, strict=True)
    )


def can_travel(spec: object) -> bool:
    """Whether rows of these specs can go from one replica to another."""
    specs = [each for each in tf.nest.flatten(spec) if each is not None]
    return all(isinstance(each, tf.TensorSpec) and each.dtype != tf.string for each in specs)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (tf.is_tensor(value) and value.dtype == tf.string)


def _size(*values: np.ndarray) -> float:
    """The largest of all finite numbers."""
    return max((_size_of(each) for each in values if each.dtype.kind in "fiuc"), default=0.0)


def _size_of(value: np.ndarray) -> float:
    found = _extent(value)
    return found if np.isfinite(found) else float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


def _extent(value: np.ndarray) -> float:
    """The largest absolute value, without a copy of a large array; no finite number where one of them is none."""
    if value.dtype.kind != "f" or not value.size:
        return float(np.abs(value).max(initial=0.0))
    return float(max(value.max(), -value.min()))


def _numbers(value: np.ndarray | None) -> np.ndarray | None:
    is_bfloat16 = value is not None and value.dtype.kind == "V"
    return value.astype("float32") if is_bfloat16 else value
