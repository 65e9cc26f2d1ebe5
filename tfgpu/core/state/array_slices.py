"""Arrays that lie in a file and are read by slices, so that nobody holds more of one than the part that it needs."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf


class ArraySlices:
    """An array of which each read returns a part.

    Where an array is expected it acts as one, which reads all of it. `ShardedVariable.assign` reads for each shard what
    the shard holds.

    Args:
        shape: the array's shape.
        dtype: its dtype.
        read: returns the part at a tuple of slices (one per axis) as an array.

    Example:
        >>> numbers = np.arange(6).reshape(2, 3)
        >>> lazy = ArraySlices(numbers.shape, numbers.dtype, lambda index: numbers[index])
        >>> lazy[1:].tolist(), np.asarray(lazy).sum(), lazy.transposed([1, 0])[2:].tolist()
        ([[3, 4, 5]], np.int64(15), [[2, 5]])
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, read: Callable[[tuple[slice, ...]], np.ndarray]):
        self.shape, self.dtype, self._read = tuple(shape), np.dtype(dtype), read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """The part at slices of the first axes."""
        given = index if isinstance(index, tuple) else (index,)
        return self._read((*given, *[slice(None)] * (self.ndim - len(given))))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self._read((slice(None),) * self.ndim), dtype)

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        return tf.convert_to_tensor(np.asarray(self), dtype, name=name)

    def transposed(self, axes: Sequence[int]) -> "ArraySlices":
        """The same array with its axes in another order, as `numpy.transpose` would return it."""
        axes = tuple(axes)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            stored = [slice(None)] * len(axes)
            for axis, part in zip(axes, index, strict=True):
                stored[axis] = part
            return np.transpose(self._read(tuple(stored)), axes)

        return ArraySlices([self.shape[axis] for axis in axes], self.dtype, read)


def flat_part(value: np.ndarray | ArraySlices, start: int, count: int) -> np.ndarray:
    """Numbers of an array in row-major order; zeros where the array has ended.

    Args:
        value: the array.
        start: the position of the first number.
        count: how many.

    Returns:
        One-dimensional, of the array's dtype.

    Example:
        >>> flat_part(np.arange(6).reshape(2, 3), 4, 3).tolist()
        [4, 5, 0]
    """
    found = np.zeros(count, value.dtype)
    stop = min(start + count, math.prod(value.shape))
    if start >= stop:
        return found
    if isinstance(value, np.ndarray) or not value.shape:
        numbers, first = np.asarray(value).reshape(-1), 0
    else:
        row = math.prod(value.shape[1:])
        first = start // row
        numbers = value[first : -(-stop // row)].reshape(-1)
        first *= row
    found[: stop - start] = numbers[start - first : stop - first]
    return found
