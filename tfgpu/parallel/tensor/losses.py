"""The cross-entropy of logits that are split over several devices, without gathering them.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.parallel import device_placement
from tfgpu.parallel.tensor.collectives import Placements, on_each

CROSS_ENTROPY_SUM = "cross_entropy_sum"
"""The name in a graph of its sums over devices, each of one number per row."""


def remember_shards(joined: tf.Tensor, logits: Sequence[tf.Tensor], placements: Placements) -> None:
    """Keeps with a tensor the shards along its last axis that it was joined from, and their devices."""
    slots.of(joined).logits_shards = tuple(logits), tuple(placements)


@functools.cache
def install() -> None:
    """Computes the cross-entropy of split logits from the shards: a few numbers per row are sent, and no logits."""

    @wrap("nn.sparse_categorical_crossentropy")
    def sparse(stock, target, output, from_logits=False, axis=-1):
        found = slots.get(output, "logits_shards")
        if found is None or not from_logits or axis not in (-1, output.shape.rank - 1):
            return stock(target, output, from_logits, axis)
        target = tf.cast(tf.convert_to_tensor(target), tf.int64)
        if target.shape.rank == output.shape.rank and target.shape[-1] == 1:
            target = tf.squeeze(target, -1)
        if target.shape.rank != output.shape.rank - 1:
            return stock(target, output, from_logits, axis)  # raises the error
        return _cross_entropy(target, *found)


def _cross_entropy(target: tf.Tensor, logits: Sequence[tf.Tensor], placements: Placements) -> tf.Tensor:
    """`log(sum(exp(logits))) - logits[target]` for each row; NaN where no shard has the target."""

    def target_logit(at: int, shard: tf.Tensor):
        place = target - sum(each.shape[-1] for each in logits[:at])
        is_here = (place >= 0) & (place < shard.shape[-1])
        value = tf.gather(shard, tf.where(is_here, place, 0), batch_dims=shard.shape.rank - 1)
        return tf.where(is_here, value, 0), tf.cast(is_here, value.dtype)

    maxima = on_each(lambda shard: tf.reduce_max(tf.stop_gradient(shard), -1), placements, logits)
    with device_placement.scope(placements[0]):
        top = tf.reduce_max(tf.stack(maxima), 0)
    sums = on_each(lambda shard: tf.reduce_sum(tf.exp(shard - top[..., None]), -1), placements, logits)
    values, hits = zip(*on_each(target_logit, placements, range(len(placements)), logits), strict=True)
    with device_placement.scope(placements[0]):
        value = tf.add_n(values, name=CROSS_ENTROPY_SUM)
        value = tf.where(tf.add_n(hits) > 0, value, float("nan"))
        return tf.math.log(tf.add_n(sums, name=CROSS_ENTROPY_SUM)) + top - value
