"""Ragged and sparse rows that stay on a GPU, where TensorFlow's own functions go to the host.

TensorFlow pads ragged rows on the host alone, and its GPU kernels for int32 work in host memory. How the rows are cut
comes from tf.data, which is on the host. So the host makes the numbers of values, and the GPU moves the values.
"""

import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context

_looks_up = step_context.Slot("on_device.looks_up")  # this thread makes a lookup of sparse IDs


def pad_on_device() -> None:
    """Pads ragged vectors where they were computed; TensorFlow copies them to the host, and the dense ones back."""

    @wrap("tf.RaggedTensor.to_tensor")
    def to_tensor(stock, self, default_value=None, name=None, shape=None):
        values = self.flat_values
        if tf.executing_eagerly() or not values.dtype.is_floating or values.shape.rank is None:
            return stock(self, default_value, name, shape)
        if tf.is_tensor(shape) or not (default_value is None or isinstance(default_value, (int, float))):
            return stock(self, default_value, name, shape)
        count = tf.shape(values)[0]
        if not count.device:  # tf.data's functions have no device: they run on the host
            return stock(self, default_value, name, shape)
        wanted, axes = tf.TensorShape(shape), self.ragged_rank + 1
        if not wanted.is_compatible_with([None] * axes + list(values.shape[1:])):
            return stock(self, default_value, name, shape)  # which raises an error
        table = self.with_flat_values(tf.range(1, count + 1))  # 0 is padding
        found = stock(table, 0, name, None if wanted.rank is None else wanted[:axes])
        return tf.ensure_shape(_padded(values, found, default_value or 0), [*found.shape, *values.shape[1:]])


def find_rows_on_device() -> None:
    """Finds the row of each value of ragged rows, for sums and means over rows, by a search in their ends.

    TensorFlow repeats each row's number in int32, for which the rows' lengths go to the host.
    """

    @wrap("segment_id_ops.row_splits_to_segment_ids")
    def row_splits_to_segment_ids(stock, splits, name=None, out_type=None):
        splits = tf.convert_to_tensor(splits, dtype_hint=tf.int64)
        if splits.shape.rank != 1 or splits.shape[0] == 0 or not splits.dtype.is_integer or step_context.is_in_xla():
            return stock(splits, name, out_type)
        ends = tf.cast(splits, tf.int64)
        rows = tf.searchsorted(ends[1:], tf.range(ends[-1]), side="right", out_type=tf.int64)
        return tf.cast(rows, out_type or splits.dtype)


def look_up_sparse_on_device() -> None:
    """Looks up sparse IDs by int64 positions; TensorFlow asks for the size of its int32 ones on the host."""

    @wrap("tf.nn.embedding_lookup_sparse")
    def embedding_lookup_sparse(stock, *args, **kwargs):
        with _looks_up.set_to(True):
            return stock(*args, **kwargs)

    @wrap("array_ops.unique")
    def unique(stock, x, out_idx=tf.int32, name=None):
        return stock(x, tf.int64 if _looks_up.get() else out_idx, name)


def _padded(values: tf.Tensor, table: tf.Tensor, default: float) -> tf.Tensor:
    """Rows of values where a table has their numbers, from 1; the default value where it has 0."""
    numbers = tf.cast(table, tf.int64)  # an int32 comparison would run on the host

    @tf.custom_gradient
    def padded(values):
        rows = tf.pad(values, [[1, 0], *[[0, 0]] * (values.shape.rank - 1)], constant_values=default)

        def gradient(upstream):  # TensorFlow's own: slices, as an embedding's gradient
            is_value = tf.not_equal(numbers, 0)
            at = tf.boolean_mask(numbers, is_value) - 1
            return tf.IndexedSlices(tf.boolean_mask(upstream, is_value), at, tf.shape(values))

        return tf.gather(rows, numbers), gradient

    return padded(values)
