"""`scatter_nd_*`, `batch_scatter_update`, `gather_nd` and `sparse_read` of a replicated `tf.Variable`.

TensorFlow has them for one device's variables; on a replicated one they raise an error without a message.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat.patch import wrap

_READS = {"gather_nd": tf.gather_nd, "sparse_read": tf.gather}


def reach_rows_of_replicated_variables() -> None:
    """Makes replicas read and assign rows of a variable, as one device does."""
    for name in ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"):
        _reach(name, functools.partial(_scattered, getattr(tf, f"tensor_{name}")))
    for name, read in _READS.items():
        _reach(name, functools.partial(_rows, read))
    _reach("batch_scatter_update", _batch_scatter)


def _reach(name: str, instead: Callable) -> None:
    @wrap(f"tf.Variable.{name}")
    def call(stock, self, *args, **kwargs):
        is_replicated = isinstance(self, tf.distribute.DistributedValues)
        return (instead if is_replicated else stock)(self, *args, **kwargs)


def _scattered(changed: Callable, variable, indices, updates, name: str | None = None):
    return variable.assign(changed(tf.convert_to_tensor(variable), indices, updates))


def _rows(read: Callable, variable, indices, name: str | None = None) -> tf.Tensor:
    return read(tf.convert_to_tensor(variable), indices)


def _batch_scatter(variable, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None):
    return variable.assign(_batch_scattered(tf.convert_to_tensor(variable), sparse_delta))


def _batch_scattered(table: tf.Tensor, delta: tf.IndexedSlices) -> tf.Tensor:
    """A tensor with slices put in its last axis of `delta.indices`; of the axes before, each index has its own."""
    indices = tf.convert_to_tensor(delta.indices)
    places = tf.where(tf.ones_like(indices, tf.bool))
    places = tf.concat([places[:, :-1], tf.cast(tf.reshape(indices, (-1, 1)), places.dtype)], 1)
    slices = tf.reshape(delta.values, tf.concat([[-1], tf.shape(table)[indices.shape.rank :]], 0))
    return tf.tensor_scatter_nd_update(table, places, tf.cast(slices, table.dtype))
