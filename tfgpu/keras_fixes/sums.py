"""Sums over the rows of all replicas, with the gradient that makes the replicas' training one device's."""

import tensorflow as tf

from tfgpu.keras_fixes import replica


def over_replicas(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over all replicas, in one collective that a gradient goes through.

    The step averages the replicas' gradients by share. Where the loss itself is weighed, as in Keras's `train_step`,
    the gradient of a sum is the sum of what comes back on each replica. In a step of the user's own the gradients are
    weighed at the end, each by its own replica's share: so that what came of another replica's loss gets that
    replica's share, the sum is weighed here and divided by the share that it will be multiplied by.
    """
    facts = replica.step()
    weigh_at_end = facts is not None and not facts.loss_is_weighed

    @tf.custom_gradient
    def add(*values):
        def gradient(*upstream):
            if not weigh_at_end:
                return replica.all_reduce(list(upstream))
            parts = replica.all_reduce([replica.by_share(part) for part in upstream])
            return [tf.math.divide_no_nan(part, tf.cast(facts.share, part.dtype)) for part in parts]

        return replica.all_reduce(list(values)), gradient

    return add(*values)


def of_batch(value: tf.Tensor) -> tf.Tensor:
    """A sum over a replica's rows becomes the sum over the whole batch, for layers and losses of your own.

    Needed where neither an average by rows nor a variable's `aggregation="sum"` says what is meant, as in a running sum
    `x = 0.9 x + 0.1 sum(rows)`. Every replica must come by here, outside `tf.cond` and loops. A gradient goes through.

    Args:
        value: a sum over the rows that this replica sees, a tensor of floats.

    Returns:
        The sum over all replicas' rows; `value` itself on one device and outside a step of `fit` or `evaluate`.

    Example:
        >>> self.total.assign(0.9 * self.total + 0.1 * of_batch(keras.ops.sum(x, axis=0)))
    """
    if replica.step() is None:
        return value
    (total,) = over_replicas([tf.where(replica.has_rows(), value, tf.zeros_like(value))])
    return total
