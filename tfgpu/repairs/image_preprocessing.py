"""Layers that mix a batch's images, or draw for the batch: each replica sees the whole batch, and picks alike."""

import random

import keras
import tensorflow as tf

from tfgpu.compat.patch import replace, wrap
from tfgpu.core import batch_rows, collectives, replication, step_context
from tfgpu.core.randomness import data_order, rng, row_draws, trace_choices
from tfgpu.core.row_mixing import row_sums
from tfgpu.repairs import Repair, probes, probing


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
        count = replication.replica_context().num_replicas_in_sync
        table = tf.ensure_shape(table, [rows.shape[0] * count, *rows.shape[1:]])
    return table


def _own(table: tf.Tensor, pictures: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(row_sums.own_rows(table, pictures), [pictures.shape[0], *table.shape[1:]])


@probes("MixUp and CutMix pair the images of one replica only")
def images_are_mixed_per_replica() -> bool:
    """Whether the only image of a replica is mixed with itself."""
    mix = keras.layers.MixUp(seed=1)
    pictures = iter([tf.zeros([1, 2, 2, 1]), tf.ones([1, 2, 2, 1])])
    first, second = probing.mirrored().run(lambda: mix(next(pictures), training=True)).values
    return float(tf.reduce_max(first)) < 1e-5 and float(tf.reduce_min(second)) > 1 - 1e-5


def pick_same_operations() -> None:
    """Makes AugMix pick the same operations on all replicas.

    Stock Keras picks with Python's `random` while tracing, so each replica's graph has other operations. Workers agree
    if the script seeds Python's `random` on all of them, as `keras.utils.set_random_seed` does, or on none.
    """

    replace("aug_mix.py_random", _Random(), by=__name__)


class _Random:
    """The part of the module `random` that AugMix uses."""

    def choice(self, options: list):
        return trace_choices.choose(lambda: (data_order.agreed_random() or random).choice(options))


@probes("AugMix picks different operations on each replica")
def picks_differ() -> bool:
    """Whether two replicas pick different operations for the same images."""
    augment = keras.layers.AugMix(num_chains=4, chain_depth=4)
    pictures = tf.ones([1, 2, 2, 3])
    picked = []

    def step():
        chains = augment.get_random_transformation(pictures)["chain_transforms"]
        picked.append([[one["layer_name"] for one in chain] for chain in chains])

    probing.mirrored().run(step)
    return picked[0] != picked[1]


REPAIRS = (
    Repair("mixed-batches", images_are_mixed_per_replica, mix_whole_batch),
    Repair("same-picks", picks_differ, pick_same_operations),
)
