"""`scatter_nd_*`, `batch_scatter_update`, `gather_nd` and `sparse_read` of a replicated `tf.Variable`.

TensorFlow has them for one device's variables; on a replicated one they raise an error without a message.
"""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat.patch import wrap

_READS = {"gather_nd": tf.gather_nd, "sparse_read": tf.gather}


def reach_rows_of_replicated_variables() -> None:
    """Makes replicas read and assign rows of a variable, as one device does."""
    for name in ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"):
        _assign_whole(name, getattr(tf, f"tensor_{name}"))
    for name, read in _READS.items():
        _read_whole(name, read)

    @wrap("tf.Variable.batch_scatter_update")
    def batch_scatter_update(stock, self, sparse_delta, *args, **kwargs):
        if not isinstance(self, tf.distribute.DistributedValues):
            return stock(self, sparse_delta, *args, **kwargs)
        return self.assign(_batch_scattered(tf.convert_to_tensor(self), sparse_delta))


def _assign_whole(name: str, changed: Callable) -> None:
    @wrap(f"tf.Variable.{name}")
    def scatter(stock, self, indices, updates, *args, **kwargs):
        if not isinstance(self, tf.distribute.DistributedValues):
            return stock(self, indices, updates, *args, **kwargs)
        return self.assign(changed(tf.convert_to_tensor(self), indices, updates))


def _read_whole(name: str, read: Callable) -> None:
    @wrap(f"tf.Variable.{name}")
    def rows(stock, self, indices, *args, **kwargs):
        if not isinstance(self, tf.distribute.DistributedValues):
            return stock(self, indices, *args, **kwargs)
        return read(tf.convert_to_tensor(self), indices)


def _batch_scattered(table: tf.Tensor, delta: tf.IndexedSlices) -> tf.Tensor:
    """A tensor with slices put in its last axis of `delta.indices`; of the axes before, each index has its own."""
    indices = tf.convert_to_tensor(delta.indices)
    places = tf.where(tf.ones_like(indices, tf.bool))
    places = tf.concat([places[:, :-1], tf.cast(tf.reshape(indices, (-1, 1)), places.dtype)], 1)
    slices = tf.reshape(delta.values, tf.concat([[-1], tf.shape(table)[indices.shape.rank :]], 0))
    return tf.tensor_scatter_nd_update(table, places, tf.cast(slices, table.dtype))
