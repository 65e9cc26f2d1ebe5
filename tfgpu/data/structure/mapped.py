"""Arrays in files that are read by rows: what is not asked for is not read."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

_CHUNK_BYTES = 1 << 26


class Mapped:
    """Presents several arrays, one per file, as one. Rows are read and converted on demand.

    Args:
        sources: memory-mapped arrays; all rows have the same shape and dtype.
        convert: what happens to rows, such as the change of their dtype; rows are converted by themselves.

    Attributes:
        shape, dtype, ndim: of the converted array.

    Example:
        >>> Mapped([np.arange(3), np.arange(5)], lambda rows: rows * 2.0).rows(np.array([4, 0])).tolist()
        [2.0, 0.0]
    """

    def __init__(self, sources: Sequence[np.ndarray], convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows):
        self._sources, self._convert = tuple(sources), convert
        self._ends = np.cumsum([len(each) for each in self._sources])
        made = convert(np.zeros_like(self._sources[0], shape=(1, *self._sources[0].shape[1:])))
        self.shape, self.dtype = (int(self._ends[-1]), *made.shape[1:]), made.dtype
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the files."""
        return max(1, self._sources[0].nbytes // max(1, len(self._sources[0])))

    def rows(self, index: np.ndarray) -> np.ndarray:
        """The rows at these places, in their order."""
        index = np.asarray(index)
        if not len(index):  # conversions may refuse no rows
            return self.rows(np.zeros(1, np.int64))[:0]
        found = np.empty((len(index), *self._sources[0].shape[1:]), self._sources[0].dtype)
        of = np.searchsorted(self._ends, index, side="right")
        for at in np.unique(of):
            chosen = of == at
            found[chosen] = self._sources[at][index[chosen] - (self._ends[at - 1] if at else 0)]
        return self._convert(found)

    def gather(self, index: tf.Tensor) -> tf.Tensor:
        """`rows` as an operation of a graph; int64 [m] -> [m, ...]."""
        found = tf.numpy_function(self.rows, [index], tf.as_dtype(self.dtype), stateful=False)
        return tf.ensure_shape(found, [None, *self.shape[1:]])

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in pieces of some MiB: the place of the first and the converted rows."""
        step = max(1, _CHUNK_BYTES // self.row_bytes)
        for first in range(0, len(self), step):
            yield first, self.rows(np.arange(first, min(first + step, len(self))))

    def converted(self, convert: Callable[[np.ndarray], np.ndarray]) -> "Mapped":
        """The same rows in another form."""
        return Mapped(self._sources, lambda rows: convert(self._convert(rows)))

    def joined(self, others: Sequence["Mapped"]) -> "Mapped":
        """These rows and then those of others.

        Raises:
            ValueError: rows of another shape or dtype.
        """
        kinds = {(each.shape[1:], each.dtype) for each in (self, *others)}
        if len(kinds) > 1:
            raise ValueError(f"arrays of rows {', '.join(f'{dtype} {shape}' for shape, dtype in sorted(kinds))}")
        return Mapped([source for each in (self, *others) for source in each._sources], self._convert)
