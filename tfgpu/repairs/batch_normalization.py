"""BatchNormalization's moments over the global batch or, on request, over each replica's rows."""

import logging

import keras
import tensorflow as tf
from keras import ops

from tfgpu.compat import layers, slots
from tfgpu.compat.keras import nn
from tfgpu.compat.patch import wrap
from tfgpu.core import replication, step_context, travel
from tfgpu.core.row_mixing import row_sums
from tfgpu.core.state import layer_state
from tfgpu.errors import unknown
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair

SCOPES = ("global", "replica")

_log = logging.getLogger(__name__)


def choose_moments(strategy: tf.distribute.Strategy, scope: str) -> tf.distribute.Strategy:
    """Sets over which rows BatchNormalization takes its moments in training; returns the strategy.

    Args:
        strategy: a strategy of replicas.
        scope: `"global"`, the whole batch's, as on one device; or `"replica"`, each replica's own, with no collective
            in the step. Moving moments are then averaged over the replicas after each block of steps. A layer with
            `synchronized=True` still takes the whole batch's.

    Raises:
        InputError: the scope is unknown.
    """
    if scope not in SCOPES:
        raise unknown("batch_norm", scope, SCOPES)
    if scope == "replica" and strategy.num_replicas_in_sync > 1:
        slots.of(strategy).batch_norm = scope
        _log.warning(
            "batch_norm='replica': BatchNormalization normalizes each of %d replicas by its own rows. The result is "
            "no longer that of one device.",
            strategy.num_replicas_in_sync,
        )
    return strategy


def has_replica_moments(strategy: tf.distribute.Strategy) -> bool:
    """Whether BatchNormalization takes each replica's moments over its own rows."""
    return slots.get(strategy, "batch_norm") == "replica"


def normalize_by_global_batch() -> None:
    """Makes BatchNormalization take mean and variance over the global batch, with masks, as one device does.

    Stock Keras takes them over each replica's rows unless `synchronized=True`, ignores that flag if there is a mask,
    and then computes the variance as E[x^2] - E[x]^2, which cancels if the mean is large. Here one collective combines
    every replica's count, mean and variance (Chan, Golub and LeVeque, 1979).
    """

    @wrap("nn.compute_moments_sync")
    def compute_moments_sync(stock, x, axes, keepdims):
        if replication.replica_context() is None:
            return stock(x, axes, keepdims)
        return _squeezed(_moments(x, axes), axes, keepdims)

    @wrap("BatchNormalization.moments")
    def moments(stock, self, inputs, mask):
        if replication.replica_context() is None:
            return stock(self, inputs, mask)
        if _takes_own_moments(self):
            for variable in layers.own_non_trainable(self):  # averaging moving averages equals averaging their inputs
                layer_state.move_own(variable)
            return stock(self, inputs, mask)
        axes = layers.reduction_axes(self)
        if mask is None:
            return nn.moments(inputs, axes, synchronized=True)
        mask = tf.cast(ops.expand_dims(mask, -1), tf.bool)
        return _squeezed(_moments(inputs, axes, mask), axes, keepdims=False)

    @wrap("keras.layers.BatchNormalization.call")
    def call(stock, self, inputs, training=None, *args, **kwargs):
        if step_context.current().is_trying:  # is known, and must not make code around it look as if it mixed rows
            return stock(self, inputs, False, *args, **kwargs)
        return call_with_moments(stock, self, inputs, training, *args, **kwargs)

    def call_with_moments(stock, self, *args, **kwargs):
        if not _takes_own_moments(self) or step_context.surely_has_rows():
            return stock(self, *args, **kwargs)
        before = [(variable, tf.identity(variable.value)) for variable in layers.own_non_trainable(self)]
        outputs = stock(self, *args, **kwargs)
        for variable, value in before:  # stand-in rows change nothing
            layer_state.put(variable, tf.where(step_context.has_rows(), variable.value, value))
        return outputs


def _moments(x: tf.Tensor, axes, mask: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Mean and variance over `axes` and all replicas, with those axes kept; the mask says which positions count."""
    count, mean, variance = _local_moments(x, axes, mask)
    if step_context.has_local_forward() or replication.replica_context().num_replicas_in_sync == 1:
        return [mean, variance]
    if mask is None and step_context.rows_are_even() and isinstance(count, int):
        means, variances = tf.unstack(_from_all_replicas([mean, variance]), axis=1)
        mean = tf.reduce_mean(means, 0)
        return [mean, tf.reduce_mean(variances + _squares(means, mean), 0)]
    count = tf.cast(count, mean.dtype) * step_context.has_rows(mean.dtype) * tf.ones_like(mean)
    counts, means, variances = tf.unstack(_from_all_replicas([count, mean, variance]), axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    squares = tf.reduce_sum(counts * (variances + _squares(means, mean)), 0)
    return [mean, tf.math.divide_no_nan(squares, total)]


def _squares(means: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """Squared distances of the replicas' means from the mean of all rows.

    `tf.nn.moments` stops the gradient at its mean, which changes second derivatives (a gradient penalty's). Here, too,
    the distances are constants of the gradient, so that those of all orders are one device's.
    """
    distances = tf.stop_gradient(means - mean)
    return distances * (distances + 2 * (means - tf.stop_gradient(means)))


def _local_moments(x: tf.Tensor, axes, mask: tf.Tensor | None) -> tuple[int | tf.Tensor, tf.Tensor, tf.Tensor]:
    """Count, mean and variance of this replica's rows; mean and variance are 0 if it has none."""
    if mask is None:
        count = _size(x, axes)
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
    else:

        def total(values):
            return tf.reduce_sum(tf.where(mask, values, tf.zeros([], x.dtype)), axes, keepdims=True)

        repeated = _size(x, [axis for axis in axes if mask.shape[axis] == 1])  # a mask has no channels
        count = tf.reduce_sum(tf.cast(mask, x.dtype), axes, keepdims=True) * tf.cast(repeated, x.dtype)
        mean = tf.math.divide_no_nan(total(x), count)
        variance = tf.math.divide_no_nan(total(tf.math.squared_difference(x, tf.stop_gradient(mean))), count)
    if step_context.surely_has_rows():
        return count, mean, variance
    return count, *(tf.where(step_context.has_rows(), value, tf.zeros_like(value)) for value in (mean, variance))


def _size(x: tf.Tensor, axes) -> int | tf.Tensor:
    """The product of some dimensions: an int if all are known, else an int32 scalar."""
    size = 1
    for axis in axes:
        size *= tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
    return size


def _squeezed(values: list[tf.Tensor], axes, keepdims: bool) -> tuple[tf.Tensor, ...]:
    return tuple(values if keepdims else (tf.squeeze(value, axes) for value in values))


def _from_all_replicas(values: list[tf.Tensor]) -> tf.Tensor:
    """The values of all replicas, [replicas, values, ...], by one differentiable all-reduce."""
    return row_sums.over_replicas([travel.at_own_place(tf.stack(values))])[0]


def _takes_own_moments(layer: keras.layers.BatchNormalization) -> bool:
    context = replication.replica_context()
    return context is not None and has_replica_moments(context.strategy) and not layer.synchronized


def batch_norm_differs() -> bool:
    """Whether BatchNormalization sees one replica's rows only."""
    return probing.differs(rows=2, layer=keras.layers.BatchNormalization)


REPAIRS = (
    Repair(
        name="global-batch-norm",
        fault="BatchNormalization takes its statistics from one replica's rows",
        issue="",
        probe=batch_norm_differs,
        apply=normalize_by_global_batch,
    ),
)
