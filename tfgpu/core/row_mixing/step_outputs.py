"""What a `predict_step` that is tried returns."""

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core.row_mixing.step_recorder import ROWS


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


def have_rows(whole: np.ndarray, parts: list[np.ndarray], sizes: list[int]) -> bool:
    """Whether an output has rows of the batch: its first axis grows with the rows that the step got.

    Args:
        whole: the output for `ROWS` rows.
        parts: the same output for other numbers of rows.
        sizes: those numbers.

    Example:
        >>> have_rows(np.zeros(7), [np.zeros(3), np.zeros(4)], [3, 4]), have_rows(np.zeros(7), [np.zeros(7)], [3])
        (True, False)
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
