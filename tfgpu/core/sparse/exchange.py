"""Exchanges sparse gradients between replicas.

Few rows are sent in the pack of the dense gradients (`to_dense`); those of large tables in one gather for all tables
(`gather`). TensorFlow itself uses three to six collectives per table.
"""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.core import step_context, travel
from tfgpu.core.replication import replica_context, replica_number, shard_index

_PACKED_BYTES = 1 << 20
"""Slices of up to this size, on all replicas together, are summed in the pack of the dense gradients."""
_BASE = 2.0**12  # base of the two digits of a row index: each is exact in float32


def can_be_packed(slices: tf.IndexedSlices) -> bool:
    """Whether slices go into the pack of the dense gradients.

    Every replica sends as many rows as all have together, so this pays only for few rows. All replicas must have the
    same number.
    """
    shape, replicas = slices.values.shape, replica_context().num_replicas_in_sync
    return _are_even([slices]) and replicas * shape.num_elements() * slices.dtype.size <= _PACKED_BYTES


def to_dense(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """This replica's rows and their indices at its position among all replicas', with zeros elsewhere, to be summed."""
    replica = replica_context()
    at = shard_index(replica.strategy, replica_number(replica))
    # float64: TensorFlow computes with int32 on the host
    indices = tf.cast(tf.ensure_shape(slices.indices, slices.values.shape[:1]), tf.float64)
    high = tf.floor(indices / _BASE)
    digits = tf.cast(tf.stack([high, indices - high * _BASE], axis=1), tf.float32)
    return travel.at_own_place(slices.values, at), travel.at_own_place(digits, at)


def from_dense(rows: tf.Tensor, digits: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """All replicas' slices, from the sums of what `to_dense` returned."""
    high, low = tf.unstack(tf.cast(tf.reshape(digits, [-1, 2]), tf.float64), axis=1)
    indices = tf.cast(high * _BASE + low, like.indices.dtype)
    return tf.IndexedSlices(tf.reshape(rows, [-1, *like.values.shape[1:]]), indices, like.dense_shape)


def gather(slices: list[tf.IndexedSlices], all_gather: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.IndexedSlices]:
    """All replicas' slices, in one collective per dtype.

    Values and indices are sent as one row of bits. If replicas may have different numbers of slices, a small collective
    exchanges the numbers first, and all are padded to the largest.

    Args:
        slices: this replica's slices.
        all_gather: stacks a tensor of all replicas.
    """
    counts = None
    if not _are_even(slices):
        counts = all_gather(tf.stack([tf.shape(each.indices, tf.int64)[0] for each in slices]))
    found = [None] * len(slices)
    for dtype in dict.fromkeys(travel.carrier(each.dtype) for each in slices):
        places = [at for at, each in enumerate(slices) if travel.carrier(each.dtype) == dtype]
        some = None if counts is None else tf.gather(counts, places, axis=1)
        for at, each in zip(places, _gather([slices[at] for at in places], some, all_gather), strict=True):
            found[at] = each
    return found


def _gather(slices: list[tf.IndexedSlices], counts: tf.Tensor | None, all_gather: Callable) -> list[tf.IndexedSlices]:
    """`gather` for slices of one dtype; `counts` [replicas, tables] if they may differ."""
    parts = [part for each in slices for part in (each.values, tf.cast(each.indices, tf.int64))]
    dtype = travel.carrier(slices[0].dtype)
    bits = [travel.to_carrier(part, dtype) for part in parts]
    if counts is not None:
        most = tf.cast(tf.reduce_max(counts, 0), tf.int32)
        bits = [_padded(each, most[at // 2]) for at, each in enumerate(bits)]
    sizes = [each.shape.num_elements() or tf.size(each) for each in bits]
    rows = tf.split(all_gather(tf.concat([tf.reshape(each, [-1]) for each in bits], 0)), sizes, axis=1)
    found = []
    for at, own in enumerate(slices):
        values, indices = (
            tf.bitcast(tf.reshape(rows[i], [-1, *bits[i].shape[1:]]), parts[i].dtype) for i in (2 * at, 2 * at + 1)
        )
        if counts is not None:
            is_there = tf.reshape(tf.sequence_mask(counts[:, at], most[at]), [-1])
            values, indices = tf.boolean_mask(values, is_there), tf.boolean_mask(indices, is_there)
        found.append(tf.IndexedSlices(values, tf.cast(indices, own.indices.dtype), own.dense_shape))
    return found


def _padded(bits: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    padded = tf.pad(bits, [[0, rows - tf.shape(bits)[0]], *[[0, 0]] * (bits.shape.rank - 1)])
    return tf.ensure_shape(padded, [None, *bits.shape[1:]])


def _are_even(slices: list[tf.IndexedSlices]) -> bool:
    """Whether it is known before the step runs that all replicas have the same number of slices of each table."""
    return step_context.rows_are_even() and all(each.values.shape.is_fully_defined() for each in slices)
