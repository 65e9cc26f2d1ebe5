"""The cross-entropy of logits that lie in parts on several devices, without bringing them together.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from keras.src.backend.tensorflow import nn

from tfgpu.compat.patch import wrap
from tfgpu.parallel import device_placement

CROSS_ENTROPY_SUM = "cross_entropy_sum"
"""What its sums over devices are called in a graph: of a number a row."""


def remember_shards(
    joined: tf.Tensor, logits: Sequence[tf.Tensor], places: Sequence[device_placement.DevicePlacement]
) -> None:
    """Lets a tensor know the parts along its last axis that it was joined from, and where they are."""
    joined._tfgpu_side_by_side = tuple(logits), tuple(places)


@functools.cache
def install() -> None:
    """Takes the cross-entropy of logits that lie in parts from the parts: a few numbers a row travel, no logits."""

    @wrap(nn, "sparse_categorical_crossentropy")
    def sparse(stock, target, output, from_logits=False, axis=-1):
        found = getattr(output, "_tfgpu_side_by_side", None)
        if found is None or not from_logits or axis not in (-1, output.shape.rank - 1):
            return stock(target, output, from_logits, axis)
        target = tf.cast(tf.convert_to_tensor(target), tf.int64)
        if target.shape.rank == output.shape.rank and target.shape[-1] == 1:
            target = tf.squeeze(target, -1)
        if target.shape.rank != output.shape.rank - 1:
            return stock(target, output, from_logits, axis)  # which says what is wrong
        return _cross_entropy(target, *found)


def _cross_entropy(
    target: tf.Tensor, logits: Sequence[tf.Tensor], places: Sequence[device_placement.DevicePlacement]
) -> tf.Tensor:
    """`log(sum(exp(logits))) - logits[target]` for each row; NaN where no part has the target."""

    def at_home(function: Callable, *columns) -> list:
        found = []
        for place, *row in zip(places, *columns, strict=True):
            with device_placement.scope(place):
                found.append(function(*row))
        return found

    def own(at: int, part: tf.Tensor):
        place = target - at * part.shape[-1]
        is_here = (place >= 0) & (place < part.shape[-1])
        value = tf.gather(part, tf.where(is_here, place, 0), batch_dims=part.shape.rank - 1)
        return tf.where(is_here, value, 0), tf.cast(is_here, value.dtype)

    tops = at_home(lambda part: tf.reduce_max(tf.stop_gradient(part), -1), logits)
    with device_placement.scope(places[0]):
        top = tf.reduce_max(tf.stack(tops), 0)
    sums = at_home(lambda part: tf.reduce_sum(tf.exp(part - top[..., None]), -1), logits)
    values, hits = zip(*at_home(own, range(len(places)), logits), strict=True)
    with device_placement.scope(places[0]):
        value = tf.add_n(values, name=CROSS_ENTROPY_SUM)
        value = tf.where(tf.add_n(hits) > 0, value, float("nan"))
        return tf.math.log(tf.add_n(sums, name=CROSS_ENTROPY_SUM)) + top - value
