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
        >>> lazy[1:].tolist(), int(np.asarray(lazy).sum()), lazy.transposed([1, 0])[2:].tolist()
        ([[3, 4, 5]], 15, [[2, 5]])
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

    def stretch(self, start: int, stop: int) -> np.ndarray:
        """Its numbers from `start` to before `stop` in row-major order; rows that hold them are read."""
        if not self.shape:
            return np.asarray(self).reshape(-1)[start:stop]
        row = math.prod(self.shape[1:])
        first = start // row
        return self[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]

    def viewed(self, dtype: np.dtype) -> "ArraySlices":
        """The same bits as numbers of another dtype of the same size."""
        return _Viewed(self, dtype)

    def transposed(self, axes: Sequence[int]) -> "ArraySlices":
        """The same array with its axes in another order, as `numpy.transpose` would return it."""
        axes = tuple(axes)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            stored = [slice(None)] * len(axes)
            for axis, part in zip(axes, index, strict=True):
                stored[axis] = part
            return np.transpose(self._read(tuple(stored)), axes)

        return ArraySlices([self.shape[axis] for axis in axes], self.dtype, read)


class _Viewed(ArraySlices):
    def __init__(self, array: ArraySlices, dtype: np.dtype):
        super().__init__(array.shape, dtype, lambda index: array[index].view(dtype))
        self._array = array

    def stretch(self, start: int, stop: int) -> np.ndarray:
        return self._array.stretch(start, stop).view(self.dtype)


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
    stop = min(start + count, math.prod(value.shape))
    if start >= stop:
        return np.zeros(count, value.dtype)
    is_in_file = isinstance(value, ArraySlices)
    numbers = value.stretch(start, stop) if is_in_file else np.asarray(value).reshape(-1)[start:stop]
    if stop - start == count:
        return numbers
    found = np.zeros(count, value.dtype)
    found[: stop - start] = numbers
    return found
