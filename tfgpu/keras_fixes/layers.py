"""Layers that must see the whole batch, and variables that are first made inside a replica."""

import tensorflow as tf
from keras import ops
from keras.src.backend.tensorflow import core, nn
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from tfgpu.keras_fixes import replica, sums
from tfgpu.keras_fixes.seam import wrap


def make_variables_once() -> None:
    """Makes a variable outside the replicas, for all at once, where a model is built by its first call inside one."""

    @wrap(core.Variable, "_initialize")
    def initialize(stock, self, value):
        ctx = replica.context()
        eager = tf.executing_eagerly() and not tf.inside_function()
        if ctx is None or isinstance(value, tf.Variable) or (eager and replica.step() is None):
            return stock(self, value)
        replica.run_outside(ctx.strategy, lambda: stock(self, value))


def normalise_by_global_batch() -> None:
    """BatchNormalization takes its mean and variance over the global batch, as one device does, masks included.

    Stock Keras takes them over each replica's rows unless `synchronized=True`, ignores that flag where a mask is
    given, and then finds the variance as E[x^2] - E[x]^2, which cancels where the mean is large. Here one collective
    brings every replica's count, mean and squared deviations together (Chan, Golub and LeVeque, 1979).
    """

    @wrap(nn, "_compute_moments_sync")
    def compute_moments_sync(stock, x, axes, keepdims):
        if replica.context() is None:
            return stock(x, axes, keepdims)
        return _moments(x, axes, keepdims)

    @wrap(BatchNormalization, "_moments")
    def moments(stock, self, inputs, mask):
        if replica.context() is None:
            return stock(self, inputs, mask)
        if mask is None:
            return nn.moments(inputs, self._reduction_axes, synchronized=True)
        weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
        return _moments(inputs, self._reduction_axes, False, tf.broadcast_to(weights, tf.shape(inputs)))


def _moments(x: tf.Tensor, axes, keepdims: bool, weights: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of `x` over `axes` and over all replicas; positions of weight 0 do not count."""
    weights = (tf.ones_like(x) if weights is None else weights) * replica.has_rows(x.dtype)

    def total(values):
        return tf.reduce_sum(tf.where(weights > 0, values, tf.zeros_like(values)), axes, keepdims=True)

    count = tf.reduce_sum(weights, axes, keepdims=True)
    mean = tf.math.divide_no_nan(total(x), count)
    counts, means, squares = tf.unstack(_gather(tf.stack([count, mean, total(tf.square(x - mean))])), axis=1)
    count = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
    squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
    variance = tf.math.divide_no_nan(squares, count)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _gather(value: tf.Tensor) -> tf.Tensor:
    """What every replica has, stacked in replica order; as an all-reduce, whose gradient TensorFlow has everywhere."""
    ctx = replica.context()
    place = tf.one_hot(tf.cast(ctx.replica_id_in_sync_group, tf.int32), ctx.num_replicas_in_sync, dtype=value.dtype)
    (table,) = sums.over_replicas([tf.tensordot(place, value, axes=0)])
    return table
