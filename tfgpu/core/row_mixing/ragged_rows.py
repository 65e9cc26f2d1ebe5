"""Rows that are padded: to the longest row of the batch, as on one device, not of the replica."""

import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, collectives, step_context, travel
from tfgpu.core.row_mixing import gathering


def pad_to_longest_row() -> None:
    """Makes `RaggedTensor.to_tensor`, `to_sparse` and `tf.sequence_mask` pad to the longest row of all replicas.

    Keras's `TextVectorization` and layers that get ragged rows use it. Padding changes what has no mask: means over
    positions, convolutions, attention.
    """

    @wrap("tf.RaggedTensor.to_tensor")
    def to_tensor(stock, self, default_value=None, name=None, shape=None):
        static = tf.TensorShape(None) if tf.is_tensor(shape) else tf.TensorShape(shape)
        if not _are_rows() or self.shape.rank is None or tf.is_tensor(shape) or static[1:].is_fully_defined():
            return stock(self, default_value, name, shape)
        if not gathering.can_meet():
            _tell_apart()
            return stock(self, default_value, name, shape)
        static = static.concatenate([]) if static.rank else tf.TensorShape([None] * self.shape.rank)
        longest = tf.unstack(tf.cast(_longest(self), self.row_splits.dtype), self.shape.rank - 1)
        wanted = [-1 if static[0] is None else static[0]]
        wanted += [longest[at] if known is None else known for at, known in enumerate(static[1:])]
        found = stock(self, default_value, name, tf.stack([tf.cast(each, self.row_splits.dtype) for each in wanted]))
        known = [inner if given is None else given for given, inner in zip(static, self.shape, strict=True)]
        return tf.ensure_shape(found, known)

    @wrap("tf.RaggedTensor.to_sparse")
    def to_sparse(stock, self, name=None):
        found = stock(self, name)
        if not _are_rows() or self.shape.rank is None:
            return found
        if not gathering.can_meet():
            _tell_apart()
            return found
        shape = tf.concat([found.dense_shape[:1], tf.cast(_longest(self), tf.int64)], 0)
        return tf.SparseTensor(found.indices, found.values, shape)

    @wrap("tf.sequence_mask")
    def sequence_mask(stock, lengths, maxlen=None, dtype=tf.bool, name=None):
        if maxlen is None and _are_rows():
            if gathering.can_meet():
                lengths = tf.convert_to_tensor(lengths)
                own = tf.maximum(tf.reduce_max(tf.cast(lengths, tf.float32)), 0.0)
                maxlen = tf.cast(_over_replicas(own), lengths.dtype)
            else:
                _tell_apart()
        return stock(lengths, maxlen, dtype, name)


def _are_rows() -> bool:
    """Whether what has rows here has a replica's rows of a batch."""
    return gathering.may_meet() and not step_context.current().is_trying


def _longest(rows: tf.RaggedTensor) -> tf.Tensor:
    """The largest size of each axis but the first, over all replicas."""
    return _over_replicas(tf.cast(rows.bounding_shape()[1:], tf.float32))


def _over_replicas(own: tf.Tensor) -> tf.Tensor:
    """The largest of the replicas' numbers, or of each."""
    (table,) = collectives.sum_small([travel.at_own_place(own)])
    return tf.reduce_max(table, 0)


def _tell_apart() -> None:
    batch_rows.warn_once(
        "Rows are padded in a condition, a loop or a tf.function, where replicas cannot communicate: each replica "
        "pads to its own longest row. Do that outside, or call `to_tensor` with a `shape` (`tf.sequence_mask` with "
        "`maxlen`)."
    )
