"""Embeddings that are split over several devices by the rows of their table, and the logits of a tied table.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgpu.compat import layers as layers_private
from tfgpu.compat.keras import in_symbolic_scope, set_mask
from tfgpu.compat.patch import override
from tfgpu.parallel import device_placement
from tfgpu.parallel.tensor import axes, collectives, losses
from tfgpu.parallel.tensor.local_shards import on_shards
from tfgpu.parallel.tensor.variable_splits import split_variables

_REVERSE = "reverse_embeddings"
"""The attribute with the kernel that computes logits, where it is not the table."""


def splits(layer: keras.layers.Embedding) -> list[axes.VariableSplit]:
    """How the variables of an embedding are split: the table by rows, the kernel of its logits by columns."""
    found = [axes.VariableSplit(layer, layers_private.EMBEDDINGS, 0)]
    has_own = isinstance(getattr(layer, _REVERSE, None), keras.Variable)
    return found + ([axes.VariableSplit(layer, _REVERSE, 1)] if has_own else [])


def split(layer: keras.layers.Embedding, placements: Sequence[device_placement.DevicePlacement], strategy) -> None:
    """Splits an embedding's table by its rows: each device looks up the rows that it has, and a sum joins them.

    A ReversibleEmbedding computes logits by columns: the cross-entropy takes them in parts.
    """
    placements = tuple(placements)
    split_variables(splits(layer), placements, strategy)
    table, rows, stock = layers_private.raw_embeddings(layer), layer.input_dim, layer.call
    sizes = [shard.shape[0] for shard in table.shards]
    masks_itself = type(layer).compute_mask is not keras.layers.Embedding.compute_mask

    def look_up(at: int, ids: tf.Tensor) -> tf.Tensor:
        own = tf.where(ids < 0, ids + rows, ids) - sum(sizes[:at])
        is_here = (own >= 0) & (own < sizes[at])
        found = tf.gather(table.shards[at].value, tf.where(is_here, own, 0))
        return tf.cast(tf.where(is_here[..., None], found, 0), layer.compute_dtype)

    def rows_of(inputs):
        ids = tf.cast(inputs, tf.int64)  # GPUs compute with int32 in the host's memory
        copies = collectives.copy_to_all(ids, placements)
        terms = collectives.on_each(look_up, placements, range(len(placements)), copies)
        with device_placement.scope(placements[0]):
            found = collectives.sum_terms(terms)
            if masks_itself and layer.mask_zero:
                set_mask(found, tf.not_equal(ids, 0))
            return found

    def logits_of(inputs):
        copies = collectives.copy_to_all(inputs, placements)
        parts = on_shards(lambda at, copy: stock(copy, reverse=True), placements, copies)
        with device_placement.scope(placements[0]):
            joined = tf.concat(parts, -1)
        losses.remember_shards(joined, parts, placements)
        return joined

    @functools.wraps(stock)
    def call(inputs, reverse=False):
        if reverse:
            return stock(inputs, reverse=True) if in_symbolic_scope() else logits_of(inputs)
        return rows_of(inputs)

    override(layer, "call", call, by=__name__)
