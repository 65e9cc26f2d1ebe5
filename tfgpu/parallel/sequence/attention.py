"""Attention of a part of the queries to the keys and values of all positions.

Each rank gathers the keys and values of all others on its device, attends with its own queries, and drops what it
gathered, the scores included; the backward pass gathers again. So a device keeps its part of the queries, keys and
values, and no more.

Source: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198
(gather in the forward pass, a sum by parts in the backward pass); M. Rabe and C. Staats, 2021 (`attention.blockwise`).
"""

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from tfgpu.attention import asked, blockwise, separate_masks
from tfgpu.compat import layers
from tfgpu.compat.patch import wrap
from tfgpu.core.randomness import rng
from tfgpu.core.randomness.row_draws import DrawShard
from tfgpu.errors import InputError
from tfgpu.parallel.sequence import positions, ranks


class NeedsAllPositions(Exception):
    """Attention that has no rule for parts of the sequence; the layer around it is computed on all positions."""


@functools.cache
def install() -> None:
    """Lets Keras's attention, called by a rank, see the keys and values of all."""
    separate_masks.keepers.register(lambda layer: ranks.here() is not None)
    separate_masks.install()
    for name in ("MultiHeadAttention", "GroupedQueryAttention"):
        _wrap_attention(name)

    @wrap("nn.dot_product_attention")
    def dot_product_attention(stock, query, key, value, bias=None, mask=None, scale=None, is_causal=False, **more):
        rank = ranks.here()
        if rank is None:
            return stock(query, key, value, bias, mask, scale, is_causal, **more)
        query, key, value = (tf.convert_to_tensor(each) for each in (query, key, value))
        if bias is not None or query.shape.rank != 4 or query.shape[2] != key.shape[2]:
            raise NeedsAllPositions
        flash = more.get("flash_attention")
        if scale is None:
            scale = key.shape[-1] ** -0.5
        given = separate_masks.masks_of(mask, is_causal)
        block = blockwise.BLOCK if (asked.is_enabled() if flash is None else flash) else None
        cap = more.get("attn_logits_soft_cap")
        return _attend(rank, query, key, value, given, scale=scale, block=block, soft_cap=cap)


def _wrap_attention(name: str) -> None:
    @wrap(f"{name}.compute_attention")
    def compute_attention(stock, self, query, key, value, attention_mask=None, training=None, *args, **more):
        rank, settings = ranks.here(), layers.attention_settings(self)
        if rank is None:
            return stock(self, query, key, value, attention_mask, training, *args, **more)
        gives_scores = args[0] if args else more.get("return_attention_scores", settings.gives_scores)
        if gives_scores or query.shape.rank != 4 or query.shape[2] != key.shape[2]:
            raise NeedsAllPositions
        given = separate_masks.masks_of(attention_mask, more.get("use_causal_mask", False))
        is_flash = asked.of_layer(self)
        dropout = None
        if settings.dropout and training:
            dropout = blockwise.Dropout(settings.dropout, settings.seed.next())
        return _attend(
            rank,
            query,
            key,
            value,
            given,
            scale=settings.scale,
            window=settings.window,
            dropout=dropout,
            block=blockwise.BLOCK if is_flash else None,
            empty_gives_zero=settings.dropout > 0 and not is_flash,  # Keras has two ways to compute attention
        ), None


def _attend(
    rank: ranks.Rank,
    query,
    key,
    value,
    given: blockwise.Masks,
    *,
    scale,
    block,
    window=None,
    dropout=None,
    soft_cap=None,
    empty_gives_zero=False,
) -> tf.Tensor:
    """[batch, queries, heads, size]: a rank's queries over the keys of all.

    Args:
        given: the masks of this rank's positions.
        block: queries in a block; None takes all of the part at once.
    """
    length = rank.group.length
    if not (positions.is_part(key, length) and positions.is_part(query, length)):
        raise NeedsAllPositions
    brought = rank.meet(ranks.to_all, (key, value, list(given.keys), _of_keys(given.pairs, rank)))
    keys, values, key_masks, pairs = brought
    masks = blockwise.Masks(
        queries=given.queries,
        keys=tuple(tf.concat(list(each), 1) for each in zip(*key_masks, strict=True)),
        pairs=_pairs(given.pairs, pairs, rank),
        is_causal=given.is_causal,
        window=window,
        first_query=rank.begin,
        empty_gives_zero=empty_gives_zero,
    )
    size, first_block, shard = length, 0, DrawShard(-2, rank.at, rank.group.count)
    if block is not None and length * rank.group.count > block:
        size, first_block, shard = block, rank.begin // block, None
        if dropout is not None and length % block:
            raise InputError(
                f"With dropout, attention by blocks of {block} queries needs parts whose length is a multiple of "
                f"{block}. Received: {rank.group.count} parts of {length} positions. Use another length, no dropout "
                "within attention, or `keras.config.disable_flash_attention()`."
            )
    if dropout is not None:
        dropout = dataclasses.replace(dropout, first_block=first_block)
    settings = {"masks": masks, "scale": scale, "soft_cap": soft_cap, "dropout": dropout, "size": size}
    skips = dropout is None or shard is None
    return _Attention(rank, shard, settings | {"skips_later_keys": skips}).run(query, keys, values)


class _Attention:
    """One rank's attention in one call of a layer."""

    def __init__(self, rank: ranks.Rank, shard: DrawShard | None, settings: dict):
        self._device, self._count = rank.group.devices[rank.at], rank.group.count
        self._shard, self._settings = shard, settings

    def run(self, query: tf.Tensor, keys: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> tf.Tensor:
        @tf.custom_gradient
        def whole(query, *parts):
            with rng.sharding(self._shard):
                output = self._blocks(query, parts).forward([query, *self._gathered(parts)])
            return output, lambda upstream: self._backward(query, parts, upstream)

        output = whole(query, *keys, *values)
        output.set_shape([*query.shape[:3], values[0].shape[3]])
        return output

    def _backward(self, query, parts, upstream) -> list[tf.Tensor]:
        with tf.device(self._device), rng.sharding(self._shard), tf.control_dependencies([upstream]):
            again = [tf.identity(part) for part in parts]
            of_query, *of_all = self._blocks(query, again).backward([query, *self._gathered(again)], upstream)
            return [of_query, *(piece for each in of_all for piece in tf.split(each, self._count, 1))]

    def _gathered(self, parts) -> list[tf.Tensor]:
        return [tf.concat(parts[: self._count], 1), tf.concat(parts[self._count :], 1)]

    def _blocks(self, query, parts) -> blockwise.Blocks:
        key = self._gathered(parts)[0]
        return blockwise.Blocks(query, key, **self._settings)


def _of_keys(pairs: tf.Tensor | None, rank: ranks.Rank) -> tf.Tensor | None:
    """A mask of this rank's keys alone, the same for all queries, as [batch, keys]; None for other masks."""
    if pairs is None or tuple(pairs.shape[1:3]) != (1, 1) or pairs.shape[-1] != rank.group.length:
        return None
    return tf.reshape(pairs, [-1, rank.group.length])


def _pairs(own: tf.Tensor | None, of_keys: list, rank: ranks.Rank) -> tf.Tensor | None:
    """A mask of this rank's queries and all keys, [batch, heads, queries, keys]."""
    if own is None:
        return None
    if of_keys[0] is not None:
        return tf.concat(of_keys, 1)[:, None, None, :]
    if own.shape[-1] != rank.group.length * rank.group.count or own.shape[-2] not in (1, rank.group.length):
        raise NeedsAllPositions
    return own
