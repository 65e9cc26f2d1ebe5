"""Losses under replicas: each stays the mean over the replica's own rows, as on one device.

The step then averages the gradients by each replica's share of the batch; a hand-written loop sums them, so there the
loss itself is multiplied by the share. Divisors other than the row count need a repair too: the valid positions of a
mask, the sum of weights, and sums without a divisor.
"""

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import targets
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, collectives, replication, step_context
from tfgpu.core.row_mixing import scalar_updates
from tfgpu.repairs import Repair, probes, probing


def keep_losses_local() -> None:
    """Multiplies a loss by its replica's share of the batch; stock Keras divides it by the number of replicas.

    Stock Keras divides by the local rows and then by the replica count, which is right only if every replica has
    the same number of rows:
    https://github.com/keras-team/keras/issues/19246, https://github.com/tensorflow/tensorflow/issues/36224
    """
    ways = {
        "scale_loss_for_distribution": tf.math.multiply_no_nan,
        "unscale_loss_for_distribution": tf.math.divide_no_nan,
    }
    for name, by in ways.items():

        @wrap(f"loss_module.{name}")
        def scale(stock, value, by=by):
            if step_context.step() is not None:
                return value
            share = batch_rows.known_share()
            if share is None:
                batch_rows.counts_alike("a loss")
                return stock(value)
            return by(value, tf.cast(share, value.dtype))


def keep_own_means_local() -> None:
    """Makes TensorFlow's helpers for hand-written loops act in a `train_step` as on one device.

    They divide by the number of replicas, because a hand-written loop sums gradients; a `train_step` averages them.
    """

    @wrap("tf.nn.compute_average_loss")
    def compute_average_loss(stock, per_example_loss, sample_weight=None, global_batch_size=None):
        loss = stock(per_example_loss, sample_weight, global_batch_size)
        if step_context.step() is None:
            return loss
        if global_batch_size is None:
            return loss * step_context.num_replicas(loss.dtype)
        return tf.math.divide_no_nan(loss, tf.cast(step_context.share(), loss.dtype))

    @wrap("tf.nn.scale_regularization_loss")
    def scale_regularization_loss(stock, regularization_loss):
        loss = stock(regularization_loss)
        return loss if step_context.step() is None else loss * step_context.num_replicas(loss.dtype)


def make_divisors_global() -> None:
    """Counts the valid positions of masks, and sums the weights of weighted means, over all replicas."""

    @wrap("loss_module.apply_mask")
    def apply_mask(stock, sample_weight, mask, dtype, reduction):
        weight = stock(sample_weight, mask, dtype, reduction)
        if mask is None or not _is_of_batch() or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        valid = tf.reduce_sum(tf.cast(mask, dtype))
        return weight * _as_local_part(valid)

    @wrap("loss_module.reduce_values")
    def reduce_values(stock, values, sample_weight=None, reduction="sum_over_batch_size"):
        loss = stock(values, sample_weight, reduction)
        is_alone = replication.replica_context() is None or step_context.current().losses_are_plain
        if is_alone or reduction in (None, "none"):
            return loss
        if tuple(values.shape) == (0,):  # stock Keras returns an empty vector; the other replicas have a scalar
            loss = tf.reduce_sum(values)
            if reduction != "sum":
                # as the others do: it may hold a collective
                loss = targets.owner("loss_module").scale_loss_for_distribution(loss)
        if values.shape.rank == 0:  # a scalar is not a sum over rows; Keras returns it unchanged
            return loss
        if reduction == "mean_with_sample_weight" and sample_weight is not None and batch_rows.can_communicate():
            return loss * _as_local_part(tf.cast(tf.reduce_sum(sample_weight), loss.dtype))
        if reduction == "sum" and step_context.step() is not None:
            return tf.math.divide_no_nan(loss, tf.cast(step_context.share(), loss.dtype))
        return loss


def _is_of_batch() -> bool:
    """Whether a loss is one of the whole batch, and replicas can tell each other its divisor here."""
    return batch_rows.can_communicate() and not step_context.current().losses_are_plain


def compare_classes_on_device() -> None:
    """Makes the circle loss compare labels as int64: TensorFlow's GPU kernels for int32 work in host memory."""

    @wrap("losses.build_pos_neg_masks")
    def build_pos_neg_masks(stock, query_labels, key_labels, *args, **kwargs):
        labels = [
            tf.cast(each, tf.int64) if tf.is_tensor(each) and each.dtype == tf.int32 else each
            for each in (query_labels, key_labels)
        ]
        return stock(*labels, *args, **kwargs)


def weigh_scalar_metrics() -> None:
    """Makes a scalar of the batch, such as a loss under a `Mean` or `Sum`, count once and not once per replica.

    In a step it is a mean over the replica's rows; in a loop by hand a trial shows what it is.
    """

    for name in ("Mean", "Sum"):

        @wrap(f"{name}.update_state")
        def update_state(stock, self, values, sample_weight=None):
            if len(getattr(values, "shape", ())) != 0 or isinstance(values, (list, tuple)):
                return stock(self, values, sample_weight)
            if step_context.step() is None:
                return scalar_updates.update(stock, self, values, sample_weight)
            values, share = tf.convert_to_tensor(values), step_context.share()
            if sample_weight is None or _is_row_count_of_trace_alone(sample_weight):
                sample_weight = share
            elif isinstance(self, keras.metrics.Sum) or _is_constant(sample_weight):
                sample_weight *= share
            return stock(self, tf.where(share > 0, values, tf.zeros_like(values)), sample_weight)


def _is_row_count_of_trace_alone(weight) -> bool:
    """Whether a weight is `x.shape[0]` that only this trace knows; on one device it is None.

    Keras weights the logged loss of each output by it.
    """
    facts = step_context.step()
    if not facts.has_added_shapes or not isinstance(weight, int):
        return False
    return weight in (tf.get_static_value(facts.rows.local), tf.get_static_value(facts.rows.total))


def _is_constant(weight) -> bool:
    """Whether a scalar's weight is the same on all replicas; else it is taken for the number of rows, as in Keras."""
    return isinstance(weight, (int, float)) and weight != tf.get_static_value(step_context.rows().local)


def _as_local_part(divisor: tf.Tensor) -> tf.Tensor:
    """The factor that turns a mean over this replica's `divisor` into its part of the global mean."""
    if step_context.has_local_forward():
        return tf.ones([], divisor.dtype)
    share = tf.cast(batch_rows.known_share(), divisor.dtype)
    divisor = tf.where(share > 0, divisor, tf.zeros_like(divisor))
    (total,) = collectives.sum_small([divisor])
    return tf.math.divide_no_nan(divisor, total * share)


@probes("tf.nn.compute_average_loss in a train_step divides by the number of replicas, as the step does too")
def average_loss_counts_replicas() -> bool:
    """Whether `tf.nn.compute_average_loss` of one row on each of two replicas is half of that row's loss."""
    strategy = probing.mirrored()
    found = strategy.run(lambda: tf.nn.compute_average_loss([1.0]))
    return float(strategy.experimental_local_results(found)[0]) == 0.5


@probes("masks and weighted means are divided by each replica's own count")
def weighted_mean_differs() -> bool:
    """Whether a mean weighted by sample weights is computed on each replica separately."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return probing.differs(rows=2, loss=loss, weights=np.array([1.0, 5.0], "float32"))


@probes("on a GPU, the circle loss copies all labels to the host")
def host_flattens_classes() -> bool:
    """Whether the host computes a part of the circle loss."""
    specs = [tf.TensorSpec([64], tf.int64), tf.TensorSpec([64, 8])]
    return "Reshape" in probing.left_to_host(keras.losses.Circle(), *specs)


REPAIRS = (
    Repair(
        "local-losses",
        probing.differs,
        keep_losses_local,
        fault="an uneven batch is averaged as if every replica had the same number of rows",
        issue="https://github.com/tensorflow/tensorflow/issues/36224",
    ),
    Repair("own-means", average_loss_counts_replicas, keep_own_means_local),
    Repair("global-divisors", weighted_mean_differs, make_divisors_global),
    Repair(
        "scalar-metrics",
        probing.differs,
        weigh_scalar_metrics,
        fault="the mean of a batch's scalar counts once per replica",
    ),
    Repair("circle-on-device", host_flattens_classes, compare_classes_on_device),
)
