"""Each replica's contribution to a gradient: summed over replicas, they give one device's gradient."""

import tensorflow as tf

from tfgpu.compat.keras import LossScaleOptimizer
from tfgpu.core import step_context


def weigh(grads: list, scaled: bool) -> list:
    """This replica's contribution to the gradients' sum: inside a step, weighted by its share; None stays None.

    In a step with local updates, the weights are averaged by rows later, so only sums over rows are scaled here.
    """
    facts = step_context.step()
    weigh = facts is not None and not (facts.loss_is_weighed or facts.loss_is_sum)
    if step_context.has_local_updates():
        weigh = facts.loss_is_sum

    def part(values: tf.Tensor) -> tf.Tensor:
        if facts.local_updates:
            return tf.math.divide_no_nan(values, tf.cast(facts.share, values.dtype))
        values = step_context.times_share(values)
        return values * step_context.num_replicas(values.dtype) if scaled else values

    def local(gradient):
        if gradient is None or not weigh:
            return gradient
        return _with_values(gradient, part(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient))

    return _without_stand_ins([local(g) for g in grads])


def loss_scale_of(optimizer):
    """The factor by which the optimizer multiplies the loss, and so the gradients: a number or a scalar tensor."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.dynamic_scale.value
    return 1.0 if optimizer.loss_scale_factor is None else optimizer.loss_scale_factor


def _without_stand_ins(grads: list) -> list:
    """Zeros if this replica saw only a stand-in row, which may have produced infinities; else the input, not copied."""
    # In a loop by hand no row stands in, and what an empty shard's loss adds, as a penalty on weights, counts.
    if step_context.step() is None or step_context.surely_has_rows():
        return grads
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    with step_context.outside_xla():
        kept = iter(tf.cond(step_context.has_rows(), lambda: values, lambda: [tf.zeros_like(v) for v in values]))
    return [None if g is None else _with_values(g, next(kept)) for g in grads]


def _with_values(gradient: tf.Tensor | tf.IndexedSlices, values: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    is_sliced = isinstance(gradient, tf.IndexedSlices)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sliced else values
