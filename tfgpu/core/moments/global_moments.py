"""Mean and variance over the rows of all replicas: one collective for those of a layer, or of several at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.core import replication, step_context, travel
from tfgpu.core.row_mixing import row_sums

_stops = step_context.Slot("moments.stops")  # a call ends where it needs the other replicas' moments
_given = step_context.Slot("moments.given")  # what a call gets there


@dataclass(frozen=True)
class LocalMoments:
    """The moments of this replica's rows.

    Attributes:
        count: how many positions they are of: a number, or a tensor of the shape of the mean.
        mean: 0 if this replica has no rows, as is the variance.
        variance: from that mean.
        are_even: it is known before the step runs that each replica's are of as many positions.
    """

    count: int | tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor
    are_even: bool

    def to_send(self) -> tf.Tensor:
        """What other replicas must know of them, in one tensor."""
        if self.are_even:
            return tf.stack([self.mean, self.variance])
        count = tf.cast(self.count, self.mean.dtype) * step_context.has_rows(self.mean.dtype)
        return tf.stack([count * tf.ones_like(self.mean), self.mean, self.variance])

    def of_all(self, table: tf.Tensor) -> list[tf.Tensor]:
        """Mean and variance over the rows of all replicas, from what each has sent: [replicas, ...].

        Combines counts, means and variances by Chan, Golub and LeVeque (1979).
        """
        if self.are_even:
            means, variances = tf.unstack(table, axis=1)
            mean = tf.reduce_mean(means, 0)
            return [mean, tf.reduce_mean(variances + _squares(means, mean), 0)]
        counts, means, variances = tf.unstack(table, axis=1)
        total = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
        squares = tf.reduce_sum(counts * (variances + _squares(means, mean)), 0)
        return [mean, tf.math.divide_no_nan(squares, total)]


class NeedsMoments(BaseException):
    """Ends a call in `in_one_collective`. No `Exception`: those Keras catches, and raises others in their place."""

    def __init__(self, local: LocalMoments):
        super().__init__()
        self.local = local


def over_replicas(x: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Mean and variance over `axes` and all replicas, with those axes kept; the mask says which positions count."""
    if (given := _given.get()) is not None:
        return given
    local = _local(x, axes, mask)
    if step_context.has_local_forward() or replication.replica_context().num_replicas_in_sync == 1:
        return [local.mean, local.variance]
    if _stops.get():
        raise NeedsMoments(local)
    return _reduced([local])[0]


def in_one_collective(calls: Sequence[Callable[[], object]]) -> list:
    """The results of calls of which none needs another's; the moments that they need travel together.

    A call that needs the other replicas' moments is made twice: it ends there the first time, when it has assigned
    nothing yet, and goes on the second time.

    Args:
        calls: each calls `over_replicas` at most once, and before it changes anything.
    """
    found = [_until_moments(call) for call in calls]
    moments = iter(_reduced([each for each in found if isinstance(each, LocalMoments)]))
    results = []
    for call, each in zip(calls, found, strict=True):
        if isinstance(each, LocalMoments):
            with _given.set_to(next(moments)):
                each = call()
        results.append(each)
    return results


def _until_moments(call: Callable[[], object]) -> object:
    """What the call returns, or the moments of this replica's rows if it needs those of the others."""
    try:
        with _stops.set_to(True):
            return call()
    except NeedsMoments as needs:
        return needs.local


def _reduced(group: list[LocalMoments]) -> list[list[tf.Tensor]]:
    """Mean and variance over all replicas for each of a group, by one differentiable all-reduce."""
    if not group:
        return []
    tables = row_sums.over_replicas([travel.at_own_place(each.to_send()) for each in group], are_apart=True)
    return [each.of_all(table) for each, table in zip(group, tables, strict=True)]


def _squares(means: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """Squared distances of the replicas' means from the mean of all rows.

    `tf.nn.moments` stops the gradient at its mean, which changes second derivatives (a gradient penalty's). Here, too,
    the distances are constants of the gradient, so that those of all orders are one device's.
    """
    distances = tf.stop_gradient(means - mean)
    return distances * (distances + 2 * (means - tf.stop_gradient(means)))


def _local(x: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> LocalMoments:
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
    if not step_context.surely_has_rows():
        mean, variance = (tf.where(step_context.has_rows(), value, tf.zeros_like(value)) for value in (mean, variance))
    return LocalMoments(count, mean, variance, mask is None and step_context.rows_are_even() and isinstance(count, int))


def _size(x: tf.Tensor, axes: Sequence[int]) -> int | tf.Tensor:
    """The product of some dimensions: an int if all are known, else an int32 scalar."""
    size = 1
    for axis in axes:
        size *= tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
    return size
