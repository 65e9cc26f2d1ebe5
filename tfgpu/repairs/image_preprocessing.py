"""Layers that mix a batch's images, or draw random numbers for the batch: each replica sees the whole batch."""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, collectives, replication, step_context
from tfgpu.core.randomness import rng, row_draws
from tfgpu.core.row_mixing import row_sums
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def mix_whole_batch() -> None:
    """Makes MixUp, CutMix, elastic transforms and equalization see the whole batch.

    Stock Keras pairs the images of one replica, and deforms the first image of every replica alike. Here one collective
    gathers the rows of all replicas; each replica computes the whole batch and keeps its own rows, of the images and of
    what comes with them in a dictionary (labels, masks, boxes). Equalization, which
    RandAugment and AugMix use too, counts how often each brightness occurs in the whole batch.
    """
    for name in ("MixUp", "CutMix", "RandomElasticTransform"):

        @wrap(f"keras.layers.{name}.call")
        def call(stock, self, data, training=True):
            pictures = data["images"] if isinstance(data, dict) else data
            if batch_rows.known_rows() is None or len(pictures.shape) != 4:
                return stock(self, data, training=training)
            with rng.same_on_all_replicas():
                if not training:
                    return stock(self, data, training=training)
                mixed = stock(self, tf.nest.map_structure(_whole, data), training=training)
            return tf.nest.map_structure(lambda table: _own(table, pictures), mixed)

    @wrap("keras.layers.RandomGaussianBlur.get_random_transformation")
    def transformation(stock, self, data, training=True, seed=None):
        pictures, rows = data["images"] if isinstance(data, dict) else data, row_draws.held_rows()
        if rows is None or len(pictures.shape) != 4 or not training:
            return stock(self, data, training, seed)
        # It draws two numbers for all images, which on two rows would be taken for one number each.
        count = tf.shape(pictures)[0]
        an_example = tf.maximum(count // tf.maximum(rows.local, 1), 1)
        with rng.same_on_all_replicas():
            found = stock(self, tf.zeros([rows.total * an_example, 1, 1, 1]), training, seed)
        own = tf.slice(found["should_apply_blur"], [rows.offset * an_example], [count])
        return {**found, "should_apply_blur": tf.ensure_shape(own, pictures.shape[:1])}

    @wrap("Equalization.custom_histogram_fixed_width")
    def histogram(stock, self, *args, **kwargs):
        found = stock(self, *args, **kwargs)
        if batch_rows.known_rows() is None:
            return found
        (total,) = collectives.sum_small([found * step_context.has_rows(found.dtype)])
        return tf.ensure_shape(total, found.shape)

    @wrap("MelSpectrogram.dbscale")
    def decibels(stock, self, power):
        """Quiet numbers are raised to `top_db` below the batch's loudest."""
        if batch_rows.known_rows() is None:
            return stock(self, power)
        (loudest,) = row_sums.most([tf.reduce_max(power)])
        found = stock(self, tf.concat([power, tf.fill(tf.shape(power[:1]), loudest)], 0))
        return tf.ensure_shape(found[:-1], power.shape)


def _whole(rows) -> tf.Tensor:
    rows = tf.convert_to_tensor(rows)
    table = row_sums.all_rows(rows)
    # If the batch size is unknown, the elastic transform deforms every image like the first.
    step = step_context.step()
    if step is not None and step.has_added_shapes:
        return tf.raw_ops.PlaceholderWithDefault(input=table, shape=[None, *table.shape[1:]])
    if rows.shape[0] is not None and table.shape[0] is None:
        table = tf.ensure_shape(
            table, [rows.shape[0] * replication.replica_context().num_replicas_in_sync, *rows.shape[1:]]
        )
    return table


def _own(table: tf.Tensor, pictures: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(row_sums.own_rows(table, pictures), [pictures.shape[0], *table.shape[1:]])


def images_are_mixed_per_replica() -> bool:
    """Whether the only image of a replica is mixed with itself."""
    mix = keras.layers.MixUp(seed=1)
    pictures = iter([tf.zeros([1, 2, 2, 1]), tf.ones([1, 2, 2, 1])])
    first, second = probing.mirrored().run(lambda: mix(next(pictures), training=True)).values
    return float(tf.reduce_max(first)) < 1e-5 and float(tf.reduce_min(second)) > 1 - 1e-5


REPAIRS = (
    Repair(
        name="mixed-batches",
        fault="MixUp and CutMix pair the images of one replica only",
        issue="",
        probe=images_are_mixed_per_replica,
        apply=mix_whole_batch,
    ),
)
