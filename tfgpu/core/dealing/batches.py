"""A batch of NumPy arrays: its rows for each worker, and their bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.core.worker_rows import Ranges
from tfgpu.errors import InputError


@dataclass(frozen=True)
class Layout:
    """The structure of a batch, and the types of its arrays.

    Attributes:
        spec: a structure of `tf.TensorSpec`.
    """

    spec: object

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Those of the arrays."""
        return datasets.flat(self.spec)

    @property
    def of_rows(self) -> object:
        """The spec of some rows of a batch."""
        loose = [tf.TensorSpec([None, *each.shape[1:]] if each.shape.rank else [], each.dtype) for each in self.specs]
        return datasets.packed(self.spec, loose)

    def arrays(self, batch: object) -> list[np.ndarray]:
        """A batch's arrays, converted as `Dataset.from_generator` does.

        Raises:
            InputError: it has another structure, or other types or shapes.
        """
        try:
            values = datasets.flat_up_to(self.spec, batch)
            found = [_array(value, each.dtype) for value, each in zip(values, self.specs, strict=True)]
        except (TypeError, ValueError) as error:
            raise InputError(f"A batch is not like the first one, {self.spec}: {error}.") from None
        for array, each in zip(found, datasets.flat(self.of_rows), strict=True):
            if not each.shape.is_compatible_with(array.shape):
                raise InputError(f"A batch has an array of shape {array.shape}, where the first has {each.shape}.")
        return found

    def packed(self, arrays: Sequence[np.ndarray]) -> object:
        """Arrays in the batch's structure."""
        return datasets.packed(self.spec, arrays)

    def read(self, shapes: Sequence[Sequence[int]], content: np.ndarray) -> list[np.ndarray]:
        """The arrays of which these are the bytes, in the order of `blocks`."""
        found = []
        for shape, each in zip(shapes, self.specs, strict=True):
            array, content = _read(shape, each.dtype.as_numpy_dtype, content)
            found.append(array)
        return found


def why_not(spec: object) -> str | None:
    """Why a batch of this spec cannot be dealt; None if it can."""
    for each in datasets.flat(spec):
        if not isinstance(each, tf.TensorSpec) or each.shape.rank is None:
            kind = {tf.RaggedTensorSpec: "ragged tensors", tf.SparseTensorSpec: "sparse tensors"}.get(type(each))
            return f"its batches hold {kind or 'parts that are None'}"
    return None


def rows_of(arrays: Sequence[np.ndarray]) -> int:
    """Rows of a batch.

    Raises:
        InputError: its arrays have different numbers of rows.
    """
    counts = {len(array) for array in arrays if array.ndim}
    if len(counts) != 1:
        raise InputError(f"All parts of a batch must have the same number of rows. Received: {sorted(counts)} rows.")
    return counts.pop()


def taken(arrays: Sequence[np.ndarray], ranges: Ranges, total: int) -> list[np.ndarray]:
    """A worker's rows of a batch."""
    pieces = ranges.pieces(total)
    return [joined([array[at : at + held] for at, held in pieces]) if array.ndim else array for array in arrays]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def blocks(arrays: Sequence[np.ndarray]) -> tuple[list[list[int]], list[memoryview]]:
    """The shapes of arrays, and their bytes."""
    return [list(array.shape) for array in arrays], [block for array in arrays for block in _blocks(array)]


def _array(value: object, dtype: tf.DType) -> np.ndarray:
    if dtype != tf.string:
        array = np.asarray(value, dtype.as_numpy_dtype)
        return np.ascontiguousarray(array) if array.ndim else array  # which would give a scalar an axis
    array = np.asarray(value, object)
    found = np.empty(array.size, object)
    found[:] = [each.encode() if isinstance(each, str) else bytes(each) for each in array.ravel()]
    return found.reshape(array.shape)


def _blocks(array: np.ndarray) -> list[memoryview]:
    if array.dtype != object:
        return [memoryview(np.ascontiguousarray(array).reshape(-1).view("uint8"))]
    lengths = np.array([len(each) for each in array.ravel()], "int64")
    return [memoryview(lengths.view("uint8")), memoryview(b"".join(array.ravel()))]


def _read(shape: Sequence[int], dtype: type, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = math.prod(shape)
    if np.dtype(dtype) != object:
        size = count * np.dtype(dtype).itemsize
        return content[:size].view(dtype).reshape(shape), content[size:]
    ends = np.cumsum(content[: 8 * count].view("int64"))
    text = content[8 * count :].tobytes()
    found = np.empty(count, object)
    found[:] = [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if count else []
    return found.reshape(shape), content[8 * count + (int(ends[-1]) if count else 0) :]
