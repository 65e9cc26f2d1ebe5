"""Shards of the global batch: one per replica, with the range of its rows in the batch."""

import contextlib
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import replication, worker_rows
from tfgpu.core.worker_rows import Ranges


class ReplicaBatch(NamedTuple):
    """A replica's shard of a batch.

    Attributes:
        data: its rows, in the batch's structure; where it has none, the batch's first row stands in.
        local: how many rows are its own, int32 scalar.
        offset: rows of the batch before its own, int32 scalar; 0 where it has none.
        total: rows of the whole batch, int32 scalar.
        whole: the whole batch, in host memory, for a step that sees all rows; else None.
    """

    data: object
    local: tf.Tensor
    offset: tf.Tensor
    total: tf.Tensor
    whole: object = None


def replica_batch(batch, at, count: int, *, stand_in: bool = True) -> ReplicaBatch:
    """Shard number `at` of `count` of a batch: any structure of tensors, ragged and sparse ones too.

    Scalars go whole to each replica. A shard without rows holds the batch's first row, on which the step computes as on
    any other; without `stand_in` it is empty.
    """
    values = [v for v in tf.nest.flatten(batch) if v is not None]
    batched = [v for v in values if v.shape.rank != 0]
    if not batched:
        return ReplicaBatch(batch, tf.constant(1), tf.cast(at, tf.int32), tf.constant(count))
    at, total = tf.cast(at, tf.int32), worker_rows.common_rows(batched)
    if isinstance(total, int) and total % count == 0:
        # All shards have one static shape, so the step needs no special case for empty ones.
        rows = total // count
        data = tf.nest.map_structure(lambda v: worker_rows.sliced(v, at * rows, rows), batch)
        return ReplicaBatch(data, tf.constant(rows), at * rows, tf.constant(total))
    rows, start, offset, held = worker_rows.uneven_range(total, at, count)
    held = held if stand_in else rows
    data = tf.nest.map_structure(lambda v: worker_rows.sliced(v, offset if stand_in else start, held), batch)
    return ReplicaBatch(data, rows, offset, tf.convert_to_tensor(total))


def shard(
    strategy: tf.distribute.Strategy,
    batch,
    *,
    gives_row_ranges: bool = True,
    gives_whole: bool = False,
    rows: int | None = None,
):
    """Splits a whole batch into a distributed value: per replica of this process a `ReplicaBatch`, or only its rows.

    Args:
        strategy: of replicas.
        batch: any structure of tensors.
        gives_row_ranges: whether a replica gets the range of its rows.
        gives_whole: whether a `ReplicaBatch` holds the whole batch too; a device copies only what its step uses of it.
        rows: of the batch, if known although the shapes of its tensors do not say it.
    """
    batch = tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)
    if rows is not None:
        with on_host():
            batch = tf.nest.map_structure(lambda v: worker_rows.with_rows(v, rows), batch)

    def of_replica(context):
        at = replication.shard_index(strategy, context.replica_id_in_sync_group)
        found = replica_batch(batch, at, context.num_replicas_in_sync, stand_in=gives_row_ranges)
        if gives_row_ranges and gives_whole:
            return found._replace(whole=batch)
        return found if gives_row_ranges else found.data

    with on_host():
        return strategy.experimental_distribute_values_from_function(of_replica)


def shard_rows(
    strategy: tf.distribute.Strategy, made: tuple, *, gives_row_ranges: bool = True, rows: int | None = None
):
    """Splits this worker's rows of a batch, as `shard` splits the whole batch.

    Args:
        strategy: of replicas on several workers.
        made: the rows (`worker_rows.WorkerRows.make`), and how many the batch has.
        gives_row_ranges: whether a replica gets the range of its rows.
        rows: of the batch, if known when the step is traced.
    """
    ranges, (batch, total) = ranges_of(strategy), made
    total = total if rows is None else rows
    with on_host():
        held = ranges.rows(total)
        if isinstance(held, int):
            batch = tf.nest.map_structure(lambda v: worker_rows.with_rows(v, held), batch)
        found = worker_rows.common_rows([v for v in tf.nest.flatten(batch) if v is not None and v.shape.rank != 0])
        with tf.control_dependencies(_is_as_many(found, held)):
            number = tf.identity(total) if rows is None else tf.constant(total)

    def of_replica(context):
        at = replication.shard_index(strategy, context.replica_id_in_sync_group)
        before = Ranges(ranges.shards[: ranges.shards.index(at)], ranges.count).rows(total)
        local, offset, _, kept = worker_rows.row_range(total, at, ranges.count)
        kept = kept if gives_row_ranges else local
        data = tf.nest.map_structure(lambda v: worker_rows.sliced(v, before, kept), batch)
        return ReplicaBatch(data, tf.convert_to_tensor(local), offset, number) if gives_row_ranges else data

    with on_host():
        return strategy.experimental_distribute_values_from_function(of_replica)


def _is_as_many(found: int | tf.Tensor, held: int | tf.Tensor) -> list[tf.Operation]:
    if isinstance(found, int) and isinstance(held, int):
        return []
    check = tf.debugging.assert_equal(found, held, "A worker has made other rows of a batch than its own.")
    return [] if check is None else [check]  # None where it runs eagerly


def ranges_of(strategy: tf.distribute.Strategy) -> Ranges:
    """Which rows of each batch this process's replicas hold."""
    devices, count = len(strategy.extended.worker_devices), strategy.num_replicas_in_sync
    first = distribute.worker_index(strategy) * devices if replication.spans_processes(strategy) else 0
    return Ranges(tuple(replication.shard_index(strategy, first + device) for device in range(devices)), count)


def on_host() -> contextlib.AbstractContextManager:
    """Keeps what the block makes in this process's host memory: TensorFlow would place it on the first GPU."""
    return tf.device("CPU:0")


def rows_and_range(data) -> tuple[Any, tf.Tensor, tuple | None]:
    """What a replica received: its data, the number of rows, and (offset, total) if known.

    Data that is not in a `ReplicaBatch` gets a stand-in row if it is empty.
    """
    if isinstance(data, ReplicaBatch):
        return *_with_static_rows(data), (data.offset, data.total)
    local = num_rows(data)
    return data if tf.get_static_value(local) else tf.nest.map_structure(with_stand_in_row, data), local, None


def _with_static_rows(batch: ReplicaBatch) -> tuple[Any, tf.Tensor]:
    """A replica's data and its number of rows: the shapes and the number say the same of the rows.

    Where a batch is an argument of a traced function (`train_on_batch`), shapes are known and the number is not. One
    row may be one that stands in; more are the replica's own.
    """
    held = tf.get_static_value(num_rows(batch.data))
    if held is None or tf.get_static_value(batch.local) is not None:
        return batch.data, batch.local
    if held > 1:
        return batch.data, tf.constant(int(held))
    return tf.nest.map_structure(_of_unknown_rows, batch.data), batch.local


def without_static_zero(value):
    """The tensor; its number of rows is known only at run time where it has none.

    Keras and TensorFlow build no graph of many layers for a batch of 0 rows (LSTM, a GRU with a mask, a reshape).
    """
    is_empty = isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] == 0
    return _of_unknown_rows(value) if is_empty else value


def _of_unknown_rows(value):
    if not isinstance(value, tf.Tensor) or not value.shape.rank or value.shape[0] is None:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])


def num_rows(data) -> tf.Tensor:
    """Rows of a replica's data: the first dimension of its first tensor, or 1 if that is a scalar."""
    for value in tf.nest.flatten(data):
        if value is not None and value.shape.rank != 0:
            return tf.convert_to_tensor(worker_rows.rows_in(value))
    return tf.constant(1)


def are_even(strategy: tf.distribute.Strategy, values: object) -> bool:
    """Whether it is known that all replicas of this process hold the same number of rows of distributed values."""
    held = [each for each in tf.nest.flatten(values) if isinstance(each, distribute.PerReplica)]
    for rows in map(strategy.experimental_local_results, held):
        counts = {each.shape[0] if tf.is_tensor(each) and each.shape.rank else -1 for each in rows}
        if len(counts) > 1 or None in counts:
            return False
    return True


def with_stand_in_row(value):
    """The tensor; if it is empty, a row of ones (zeros for integers), which is safe in logarithms and norms."""
    if not tf.is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or value.shape.rank == 0:
        return value
    if value.shape[0]:
        return value

    def one():
        shape = tf.concat([[1], tf.shape(value)[1:]], 0)
        return tf.ones(shape, value.dtype) if value.dtype.is_floating else tf.zeros(shape, value.dtype)

    if value.shape[0] == 0:
        return tf.concat([value, one()], 0)  # gradients still reach what has made the tensor
    row = tf.cond(tf.shape(value)[0] > 0, lambda: value, one)  # passes the tensor on without a copy
    if value.shape[0] is None:
        row.set_shape(value.shape)
    return row
