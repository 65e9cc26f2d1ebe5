"""The masks of an attention layer's call, kept apart: one of queries and keys would take the square of the length."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.attention import blockwise
from tfgpu.compat import layers, patch, slots
from tfgpu.compat.patch import wrap
from tfgpu.core.extensions import Registry

keepers: Registry = Registry()
"""`keeps(layer)` says that what computes the layer's attention takes its masks apart."""


@dataclass(frozen=True)
class SeparateMasks:
    """The masks of a layer's call, not yet merged to one of queries and keys.

    Attributes:
        masks: the masks.
        merged: returns what the layer's own code expects.
    """

    masks: blockwise.Masks
    merged: Callable[[], tf.Tensor | None]


@functools.cache
def install() -> None:
    """Lets Keras's attention layers pass on `SeparateMasks` where a keeper takes them."""
    patch.if_not_needed(install.cache_clear)
    for name in ("MultiHeadAttention", "GroupedQueryAttention"):

        @wrap(f"{name}.compute_attention_mask")
        def compute_attention_mask(
            stock,
            self,
            query,
            value,
            query_mask=None,
            value_mask=None,
            key_mask=None,
            attention_mask=None,
            use_causal_mask=False,
        ):
            given = (query_mask, value_mask, key_mask, attention_mask, use_causal_mask)
            merged = functools.partial(stock, self, query, value, *given)
            if layers.has_own_attention(self) or not any(keeps(self) for keeps in keepers):
                return merged()
            masks = blockwise.Masks(
                queries=None if query_mask is None else tf.cast(query_mask, tf.bool),
                keys=tuple(tf.cast(mask, tf.bool) for mask in (value_mask, key_mask) if mask is not None),
                pairs=pairs_of(attention_mask),
                is_causal=use_causal_mask,
                window=layers.attention_settings(self).window,
            )
            return SeparateMasks(masks, merged)


def masks_of(attention_mask: SeparateMasks | tf.Tensor | None, is_causal: bool) -> blockwise.Masks:
    """The masks that a layer's `_compute_attention` was given."""
    if isinstance(attention_mask, SeparateMasks):
        return attention_mask.masks
    if (rows := rows_of(attention_mask)) is not None:
        return blockwise.Masks(rows=rows, is_causal=is_causal)
    return blockwise.Masks(pairs=pairs_of(attention_mask), is_causal=is_causal)


def pairs_of(mask: tf.Tensor | None) -> tf.Tensor | None:
    """A mask of queries and keys as [batch, heads, queries, keys], booleans."""
    return None if mask is None else by_heads(tf.cast(mask, tf.bool))


def by_heads(value: tf.Tensor) -> tf.Tensor:
    """[batch, heads, queries, keys] of a mask without heads or batch."""
    while value.shape.rank < 4:
        value = tf.expand_dims(value, -3)
    return value


def note_rows(mask: tf.Tensor, rows: Callable[[tf.Tensor, int], tf.Tensor]) -> tf.Tensor:
    """Notes how a mask of queries and keys is made for some of the queries alone; returns the mask.

    In a graph, a mask that nobody reads is not computed. A copy of it has no note, and is read as a whole.

    Args:
        mask: [batch, queries, keys].
        rows: as `Masks.rows`.
    """
    slots.of(mask).mask_rows = rows
    return mask


def rows_of(mask: tf.Tensor | None) -> Callable[[tf.Tensor, int], tf.Tensor] | None:
    """What `note_rows` has noted of a mask, or None."""
    return slots.get(mask, "mask_rows")
