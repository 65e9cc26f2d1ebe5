"""Which rows of a global batch go to which replica and worker, and datasets that make one worker's rows only.

    worker_rows.register(dataset, WorkerRows(make))   # `make(ranges)` gives (rows, total), batch for batch
    worker_rows.of(dataset).make(ranges)

`fit`, `evaluate` and `predict` on several workers use what is registered. Nothing else changes: other readers of the
dataset get whole batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots

_UNEQUAL = "All parts of a batch must have the same number of rows."


@dataclass(frozen=True)
class Ranges:
    """The rows of each batch that one worker makes: the shards of its replicas, one after another.

    A shard without rows holds the batch's first row, which stands in. So a worker makes a row at least, and a row may
    come twice.

    Attributes:
        shards: number of each local replica's shard, in the order of the devices.
        count: shards of a batch, which is the number of all replicas.
        is_even: whether shards differ by at most one row. Else all have as many rows as the first, until none is left,
            as TensorFlow cuts a batch.

    Example:
        >>> Ranges((1, 3), 4).pieces(6)  # shards of 2, 2, 1 and 1 rows
        [(2, 2), (5, 1)]
        >>> Ranges((1, 3), 4).pieces(2)
        [(1, 1), (0, 1)]
        >>> Ranges((1, 3), 4, is_even=False).pieces(5)  # shards of 2, 2, 1 and 0 rows
        [(2, 2), (0, 1)]
    """

    shards: tuple[int, ...]
    count: int
    is_even: bool = True

    def pieces(self, total: int | tf.Tensor) -> list[tuple]:
        """For each shard, the first of its rows and their number.

        Args:
            total: rows of the batch, a number or an integer scalar; the pieces are of the same kind, tensors of int32.
        """
        if isinstance(total, int):
            found = [_piece(total, at, self.count, self.is_even) for at in self.shards]
            return [(start, rows) if rows else (0, min(1, total)) for start, rows in found]
        total, numbers = tf.cast(total, tf.int32), [tf.constant(at) for at in self.shards]
        if self.is_even:
            return [uneven_range(total, at, self.count)[2:] for at in numbers]
        found = [(_stock_rows(total, at, self.count), at * -(-total // self.count)) for at in numbers]
        return [(tf.where(rows > 0, at, 0), tf.minimum(tf.maximum(rows, 1), total)) for rows, at in found]

    def own(self, total: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For each shard, where it begins among the worker's rows, and its rows without one that stands in: int32."""
        total, found, before = tf.cast(total, tf.int32), [], tf.constant(0)
        for at, (_, held) in zip(map(tf.constant, self.shards), self.pieces(total), strict=True):
            rows = uneven_range(total, at, self.count)[0] if self.is_even else _stock_rows(total, at, self.count)
            found.append((before, rows))
            before += held
        return found

    def rows(self, total: int | tf.Tensor) -> int | tf.Tensor:
        """How many rows the worker makes of a batch of `total` rows."""
        return sum(held for _, held in self.pieces(total))

    def indices(self, total: int | tf.Tensor) -> tf.Tensor:
        """The places of the worker's rows in a batch of `total` rows: int64 [rows]."""
        pieces = [tf.range(start, start + held) for start, held in self.pieces(total)]
        return tf.cast(tf.concat(pieces, 0), tf.int64)

    def take(self, batch: object) -> tuple[object, int | tf.Tensor]:
        """The worker's rows of a whole batch, and the number of rows of the batch.

        Args:
            batch: any structure of tensors, ragged and sparse ones too; scalars stay whole.
        """
        total = common_rows([v for v in tf.nest.flatten(batch) if v is not None and v.shape.rank != 0])
        return tf.nest.map_structure(lambda value: self.take_from(value, total), batch), total

    def take_from(self, value: object, total: int | tf.Tensor) -> object:
        """The worker's rows of one tensor of a batch of `total` rows."""
        return _joined([sliced(value, *piece) for piece in self.pieces(total)])


@dataclass(frozen=True)
class WorkerRows:
    """How to make one worker's rows of each batch of a dataset.

    Attributes:
        make: gives a dataset of `(rows, total)` for each batch of the original, in the same order: the worker's rows,
            bit for bit, in the batch's structure, and the number of rows of the batch, an int32 scalar. Shapes are
            static where the batch's are and all shards are equal. Each iteration of it must count as one of the
            original's.
        first: gives a whole batch that all workers make alike, in order to compare what they read: the one that the
            next iteration begins with. It must not count as an iteration. None: the first iteration of a `fit` that
            compares reads whole batches, if it has no `make_showing` either.
        make_showing: `make` with the number of a batch of which all rows come besides, in order, in elements before its
            own, each of as many rows as the first of them; the last one is filled up.
    """

    make: Callable[[Ranges], tf.data.Dataset]
    first: Callable[[], object] | None = None
    make_showing: Callable[[Ranges, int], tf.data.Dataset] | None = None


def register(dataset: tf.data.Dataset, rows: WorkerRows) -> tf.data.Dataset:
    """Lets workers read only their rows of a dataset of whole batches; returns the dataset.

    Example:
        >>> batches = tf.data.Dataset.range(6).batch(4)
        >>> dataset = register(batches, WorkerRows(lambda ranges: batches.map(ranges.take)))
        >>> [(rows.numpy().tolist(), int(total)) for rows, total in of(dataset).make(Ranges((1,), 2))]
        [([2, 3], 4), ([5], 2)]
    """
    slots.of(dataset).worker_rows = rows
    return dataset


def of(dataset: tf.data.Dataset) -> WorkerRows | None:
    """How to make one worker's rows of a dataset; None if that is not known."""
    return slots.get(dataset, "worker_rows")


def _piece(total: int, at: int, count: int, is_even: bool) -> tuple[int, int]:
    if not is_even:
        most = -(-total // count)
        return at * most, max(0, min(most, total - at * most))
    rows = total // count + (at < total % count)
    return at * (total // count) + min(at, total % count), rows


def _stock_rows(total: tf.Tensor, at: tf.Tensor, count: int) -> tf.Tensor:
    """Rows of shard number `at` as TensorFlow cuts a batch of `total` rows."""
    most = -(-total // count)
    return tf.maximum(0, tf.minimum(most, total - at * most))


def first_rows(parts: Sequence, rows: int):
    """The first rows of tensors that follow one another; a scalar is the same in all."""
    return sliced(_joined(list(parts)), 0, rows)


def _joined(parts: list):
    if len(parts) == 1 or parts[0] is None or parts[0].shape.rank == 0:
        return parts[0]
    return tf.sparse.concat(0, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, 0)


def row_range(total: int | tf.Tensor, at, count: int) -> tuple:
    """Which of `total` rows are shard number `at` of `count`: how many, rows before them, `total`, and rows held.

    A shard without rows holds one that stands in, the first. All are numbers or int32 scalars.
    """
    at = tf.cast(at, tf.int32)
    if isinstance(total, int) and total % count == 0:
        return total // count, at * (total // count), total, total // count
    local, _, offset, held = uneven_range(total, at, count)
    return local, offset, total, held


def uneven_range(total: int | tf.Tensor, at: tf.Tensor, count: int) -> tuple[tf.Tensor, ...]:
    rows, left = total // count, total % count
    start, rows = at * rows + tf.minimum(at, left), rows + tf.cast(at < left, tf.int32)
    return rows, start, tf.where(rows > 0, start, 0), tf.minimum(tf.maximum(rows, 1), total)


def common_rows(values: list) -> int | tf.Tensor:
    """The number of rows of a batch's tensors: an int if all are known, else an int32 scalar that checks them.

    Raises:
        ValueError: they have different numbers of rows.
    """
    static = {v.shape[0] for v in values} - {None}
    if len(static) > 1:
        raise ValueError(f"{_UNEQUAL} Received: {sorted(static)} rows.")
    if static and all(v.shape[0] is not None for v in values):
        return static.pop()
    total = rows_in(values[0])
    checks = [tf.debugging.assert_equal(rows_in(v), total, _UNEQUAL) for v in values[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(total)


def with_rows(value, rows: int):
    """A tensor whose shape says how many rows it has; other values are passed on."""
    if not isinstance(value, tf.Tensor) or value.shape.rank in (0, None):
        return value
    return tf.ensure_shape(value, [rows, *value.shape[1:]])


def rows_in(value) -> int | tf.Tensor:
    """Rows of a tensor: an int if known, else an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor) and value.shape[0] is None:
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0] if value.shape[0] is None else value.shape[0]


def sliced(value, start, rows):
    """`rows` rows of a tensor from `start` on; a scalar stays whole."""
    if value is None or value.shape.rank == 0:
        return value
    if isinstance(value, tf.SparseTensor):
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros([value.shape.rank - 1], tf.int64)], 0)
        size = tf.concat([[tf.cast(rows, tf.int64)], value.dense_shape[1:]], 0)
        return tf.sparse.slice(value, begin, size)
    part = value[start : start + rows]
    if isinstance(rows, int) and isinstance(value, tf.Tensor):
        part = tf.ensure_shape(part, [rows, *value.shape[1:]])
    return part
