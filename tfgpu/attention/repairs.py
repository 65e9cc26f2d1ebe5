"""Keras's flash attention on TensorFlow, where Keras has none: `keras.config.enable_flash_attention()`."""

import keras
import tensorflow as tf

from tfgpu.attention import asked, blockwise, separate_masks
from tfgpu.compat import layers
from tfgpu.compat.keras import has_enabled_flash_attention
from tfgpu.compat.patch import wrap
from tfgpu.repairs import Repair


def compute_by_blocks() -> None:
    """Lets attention work by blocks where flash attention is asked for."""
    if has_enabled_flash_attention():  # before there were repairs
        _switch(True)
    for name, value in (("enable_flash_attention", True), ("disable_flash_attention", False)):
        _wrap_switch(name, value)

    @wrap("nn.dot_product_attention")
    def dot_product_attention(
        stock, query, key, value, bias=None, mask=None, scale=None, is_causal=False, flash_attention=None, **more
    ):
        is_asked = asked.is_enabled() if flash_attention is None else flash_attention
        asked.note_attention()
        query, key, value = (tf.convert_to_tensor(each) for each in (query, key, value))
        if not is_asked or query.shape.rank != 4:
            return stock(query, key, value, bias, mask, scale, is_causal, flash_attention, **more)
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        query, key, value = (tf.cast(each, dtype) for each in (query, key, value))
        if scale is None:
            scale = 1 / tf.sqrt(tf.cast(tf.shape(key)[-1], tf.float32))
        masks = blockwise.Masks(pairs=separate_masks.pairs_of(mask), is_causal=is_causal)
        cap = more.get("attn_logits_soft_cap")
        bias = None if bias is None else separate_masks.by_heads(tf.convert_to_tensor(bias, dtype))
        return blockwise.attention(query, key, value, scale=scale, bias=bias, masks=masks, soft_cap=cap)

    separate_masks.keepers.register(asked.of_layer)
    separate_masks.install()
    for name in ("MultiHeadAttention", "GroupedQueryAttention"):

        @wrap(f"{name}.compute_attention")
        def compute_attention(stock, self, query, key, value, attention_mask=None, training=None, *args, **more):
            settings = layers.attention_settings(self)
            gives_scores = args[0] if args else more.get("return_attention_scores", settings.gives_scores)
            asked.note_attention()
            if not asked.of_layer(self) or gives_scores or len(query.shape) != 4:
                if isinstance(attention_mask, separate_masks.SeparateMasks):
                    attention_mask = attention_mask.merged()
                return stock(self, query, key, value, attention_mask, training, *args, **more)
            masks = separate_masks.masks_of(attention_mask, more.get("use_causal_mask", False))
            dropout = None
            if settings.dropout and training:
                dropout = blockwise.Dropout(settings.dropout, settings.seed.next())
            return blockwise.attention(query, key, value, scale=settings.scale, masks=masks, dropout=dropout), None


def _wrap_switch(name: str, value: bool) -> None:
    @wrap(f"keras.config.{name}")
    def switch(stock):
        _switch(value)
        stock()


def _switch(value: bool) -> None:
    asked.enable(value)
    for install in asked.takers if value else ():
        install()


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
