"""Keras's flash attention on TensorFlow, where Keras has none: `keras.config.enable_flash_attention()`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.attention import blockwise
from tfgpu.compat import layers, slots
from tfgpu.compat.keras import has_enabled_flash_attention
from tfgpu.compat.patch import wrap
from tfgpu.repairs.repair import Repair


@dataclass(frozen=True)
class _Apart:
    """The masks of a layer's call, not yet merged to one of queries and keys.

    Attributes:
        masks: the masks.
        merged: returns what the layer's own code expects.
    """

    masks: blockwise.Masks
    merged: Callable[[], tf.Tensor | None]


def is_enabled() -> bool:
    """Whether the script has called `keras.config.enable_flash_attention()`, and not disabled it since."""
    return slots.get(keras.config, "flash_attention", False)


def compute_by_blocks() -> None:
    """Lets attention work by blocks where flash attention is asked for."""
    slots.of(keras.config).flash_attention = has_enabled_flash_attention()  # before there were repairs
    for name, value in (("enable_flash_attention", True), ("disable_flash_attention", False)):
        _wrap_switch(name, value)

    @wrap("nn.dot_product_attention")
    def dot_product_attention(
        stock, query, key, value, bias=None, mask=None, scale=None, is_causal=False, flash_attention=None, **more
    ):
        asked = is_enabled() if flash_attention is None else flash_attention
        query, key, value = (tf.convert_to_tensor(each) for each in (query, key, value))
        if not asked or query.shape.rank != 4:
            return stock(query, key, value, bias, mask, scale, is_causal, flash_attention, **more)
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        query, key, value = (tf.cast(each, dtype) for each in (query, key, value))
        if scale is None:
            scale = 1 / tf.sqrt(tf.cast(tf.shape(key)[-1], tf.float32))
        return blockwise.attention(
            query,
            key,
            value,
            scale=scale,
            bias=None if bias is None else _by_heads(tf.convert_to_tensor(bias, dtype)),
            masks=blockwise.Masks(pairs=_pairs(mask), is_causal=is_causal),
            soft_cap=more.get("attn_logits_soft_cap"),
        )

    _wrap_masks()
    _wrap_attention()


def _wrap_switch(name: str, value: bool) -> None:
    @wrap(f"keras.config.{name}")
    def switch(stock):
        slots.of(keras.config).flash_attention = value
        stock()


def _wrap_masks() -> None:
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
            if not _is_asked(self) or layers.has_own_attention(self):
                return merged()
            masks = blockwise.Masks(
                queries=None if query_mask is None else tf.cast(query_mask, tf.bool),
                keys=tuple(tf.cast(mask, tf.bool) for mask in (value_mask, key_mask) if mask is not None),
                pairs=_pairs(attention_mask),
                is_causal=use_causal_mask,
                window=layers.attention_settings(self).window,
            )
            return _Apart(masks, merged)


def _wrap_attention() -> None:
    for name in ("MultiHeadAttention", "GroupedQueryAttention"):

        @wrap(f"{name}.compute_attention")
        def compute_attention(stock, self, query, key, value, attention_mask=None, training=None, *args, **more):
            settings = layers.attention_settings(self)
            gives_scores = args[0] if args else more.get("return_attention_scores", settings.gives_scores)
            if not _is_asked(self) or gives_scores or len(query.shape) != 4:
                if isinstance(attention_mask, _Apart):
                    attention_mask = attention_mask.merged()
                return stock(self, query, key, value, attention_mask, training, *args, **more)
            if isinstance(attention_mask, _Apart):
                masks = attention_mask.masks
            else:
                masks = blockwise.Masks(pairs=_pairs(attention_mask), is_causal=more.get("use_causal_mask", False))
            dropout = None
            if settings.dropout and training:
                dropout = blockwise.Dropout(settings.dropout, settings.seed.next())
            return blockwise.attention(query, key, value, scale=settings.scale, masks=masks, dropout=dropout), None


def _is_asked(layer: keras.layers.Layer) -> bool:
    flash = layers.attention_settings(layer).flash
    return is_enabled() if flash is None else flash


def _pairs(mask: tf.Tensor | None) -> tf.Tensor | None:
    return None if mask is None else _by_heads(tf.cast(mask, tf.bool))


def _by_heads(value: tf.Tensor) -> tf.Tensor:
    """[batch, heads, queries, keys] of a mask without heads or batch."""
    while value.shape.rank < 4:
        value = tf.expand_dims(value, -3)
    return value


def lacks_flash_attention() -> bool:
    """Whether Keras refuses flash attention on TensorFlow."""
    x = tf.ones([1, 2, 1, 1])
    try:
        keras.ops.dot_product_attention(x, x, x, flash_attention=True)
    except ValueError:
        return True
    return False


REPAIRS = (
    Repair(
        name="flash-attention",
        fault="flash attention is refused on TensorFlow, so attention takes the square of the length in memory",
        issue="",
        probe=lacks_flash_attention,
        apply=compute_by_blocks,
    ),
)
