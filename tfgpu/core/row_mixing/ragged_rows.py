"""Ragged rows that become dense: padded to the longest row of the batch, as on one device, not of the replica."""

import logging

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, replication, step_context, travel
from tfgpu.core.row_mixing import gathering

_log = logging.getLogger(__name__)


def pad_to_longest_row() -> None:
    """Makes `RaggedTensor.to_tensor` and `to_sparse` pad to the longest row of all replicas.

    Keras's `TextVectorization` and layers that get ragged rows use it. Padding changes what has no mask: means over
    positions, convolutions, attention.
    """

    @wrap("tf.RaggedTensor.to_tensor")
    def to_tensor(stock, self, default_value=None, name=None, shape=None):
        static = tf.TensorShape(None) if tf.is_tensor(shape) else tf.TensorShape(shape)
        if not _is_own(self) or tf.is_tensor(shape) or static[1:].is_fully_defined():
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
        if not _is_own(self):
            return found
        if not gathering.can_meet():
            _tell_apart()
            return found
        shape = tf.concat([found.dense_shape[:1], tf.cast(_longest(self), tf.int64)], 0)
        return tf.SparseTensor(found.indices, found.values, shape)


def _is_own(rows: tf.RaggedTensor) -> bool:
    """Whether these are a replica's rows of a batch."""
    return gathering.may_meet() and not step_context.current().is_trying and rows.shape.rank is not None


def _longest(rows: tf.RaggedTensor) -> tf.Tensor:
    """The largest size of each axis but the first, over all replicas."""
    own = tf.cast(rows.bounding_shape()[1:], tf.float32)
    (table,) = collectives.sum_small([travel.at_own_place(own)])
    return tf.reduce_max(table, 0)


def _tell_apart() -> None:
    told = vars(slots.of(replication.replica_context().strategy)).setdefault("told_apart", set())
    if "ragged rows" not in told:
        told.add("ragged rows")
        _log.warning(
            "Ragged rows become dense in a condition, a loop or a tf.function, where replicas cannot communicate: each "
            "replica pads to its own longest row. Do that outside, or call `to_tensor` with a `shape`."
        )
