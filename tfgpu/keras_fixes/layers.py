"""Layers that must see the whole batch, and variables that are first made inside a replica."""

import tensorflow as tf
from keras import ops
from keras.src.backend.tensorflow import core, nn
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from tfgpu.keras_fixes import replica
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

    Stock Keras takes them over each replica's rows unless `synchronized=True`, ignores that flag where a mask is given,
    and squeezes axes of size one away. One packed all-reduce a layer, where stock's synchronised form has three.
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
    if weights is None:
        # Sums around a shift common to all replicas would be kinder to rounding; stock uses plain sums too.
        part, count = x, tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), x.dtype)
    else:
        part, count = tf.where(weights > 0, x, tf.zeros_like(x)), tf.reduce_sum(weights, axes, keepdims=True)
    total, squares, count = replica.all_reduce(
        [tf.reduce_sum(part, axes, keepdims=True), tf.reduce_sum(part * part, axes, keepdims=True), count]
    )
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - mean * mean, 0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
