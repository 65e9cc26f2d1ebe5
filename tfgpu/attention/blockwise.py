"""Attention by blocks of queries.

The scores of all queries and keys are never whole: a block of queries meets all keys, its output is kept and its scores
are not. The backward pass computes them again. Each row of the softmax is whole, so the numbers are those of plain
attention but for the order in which gradients of keys and values add up.

Source: M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, arXiv:2112.05682.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.core import step_context
from tfgpu.core.randomness import rng

BLOCK = 256
"""Queries in a block."""


@dataclass(frozen=True)
class Masks:
    """Which keys a query sees: those that every mask allows. True allows.

    Attributes:
        queries: bool [batch, queries], or None.
        keys: bool [batch, keys] each.
        pairs: bool, broadcastable to [batch, heads, queries, keys], or None. It is as long as the square of the length.
        rows: `rows(begin, count)` makes such pairs for `count` queries from `begin` on, broadcastable to [batch, count,
            keys]; or None.
        is_causal: a query sees keys up to its own position.
        window: a query sees keys less than this far from it, or None.
        first_query: the position of the first query among the keys, where the queries are a part of the sequence.
        empty_gives_zero: a query that sees no key gets zeros, not the mean of all values.
    """

    queries: tf.Tensor | None = None
    keys: Sequence[tf.Tensor] = ()
    pairs: tf.Tensor | None = None
    rows: Callable[[tf.Tensor, int], tf.Tensor] | None = None
    is_causal: bool = False
    window: int | None = None
    first_query: int = 0
    empty_gives_zero: bool = False


@dataclass(frozen=True)
class Dropout:
    """What is left out of the probabilities in training.

    Attributes:
        rate: from 0 to below 1.
        seed: of this call, two integers.
        first_block: the number of the first block in the sequence, where the queries are a part of it.
    """

    rate: float
    seed: tf.Tensor
    first_block: int = 0


def attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    scale: float | tf.Tensor,
    bias: tf.Tensor | None = None,
    masks: Masks = Masks(),
    soft_cap: float | None = None,
    dropout: Dropout | None = None,
    block: int | None = None,
) -> tf.Tensor:
    """Computes `softmax(scale * query @ key + bias) @ value` by blocks of queries.

    Args:
        query: [batch, queries, heads, size].
        key: [batch, keys, heads, size]; a divisor of the heads is enough: each is then shared by as many queries' heads
            as follow one another.
        value: [batch, keys, heads, value size], with as many heads as `key`.
        scale: of the scores.
        bias: added to the scores; broadcastable to [batch, heads, queries, keys].
        masks: which keys a query sees.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        dropout: of the probabilities.
        block: queries in a block; None takes 256.

    Returns:
        [batch, queries, heads, value size], of the inputs' dtype.

    Example:
        >>> x = tf.ones([2, 5, 4, 8])
        >>> attention(x, x, x, scale=0.35, masks=Masks(is_causal=True), block=2).shape
        TensorShape([2, 5, 4, 8])
    """
    heads, shared = query.shape[2], key.shape[2]
    if heads is not None and shared is not None and heads > shared:
        key, value = (tf.repeat(each, heads // shared, axis=2) for each in (key, value))
    run = Blocks(query, key, masks=masks, scale=scale, soft_cap=soft_cap, dropout=dropout, size=block or BLOCK)
    return run.run([query, key, value, *([] if bias is None else [bias])])


class Loop(abc.ABC):
    """Attention of all queries, a block of them at a time.

    Args:
        query: [batch, queries, heads, size].
        size: queries in a block.
    """

    def __init__(self, query: tf.Tensor, *, size: int):
        length = query.shape[1]
        self._size = min(size, length) if length else size
        self._length = tf.shape(query)[1] if length is None else length
        self._count = -(-self._length // self._size)
        self._padding = self._count * self._size - self._length

    @abc.abstractmethod
    def _block(self, at, query, key, value, others: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output for the queries of a block, [batch, queries, heads, value size]."""

    def run(self, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output for all queries, of which the scores are dropped, and computed again in the backward pass.

        Args:
            given: queries, keys, values, and what else has a gradient: [batch, heads, queries, keys] by rows of
                queries, or of another rank.
        """
        query, _, value, *_ = given
        # The backward pass may be taken elsewhere: on another device, or by who knows of other rows to draw for.
        device, step = query.device, step_context.copied()

        @tf.custom_gradient
        def whole(*given):
            def gradient(upstream):
                with tf.device(device), step_context.scope(**step):
                    return self.backward(given, upstream)

            return self.forward(given), gradient

        output = whole(*given)
        output.set_shape([*query.shape[:3], value.shape[3]])
        return output

    def forward(self, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output for all queries."""
        query, key, value, *others = given
        query, others = self._padded(query, 1), [self._padded(each, 2) for each in others]
        shape = tf.TensorShape([query.shape[0], self._size, query.shape[2], value.shape[3]])
        outputs = tf.TensorArray(value.dtype, size=self._count, element_shape=shape)

        def step(at, outputs):
            rows, more = self._rows(query, at, 1), [self._rows(each, at, 2) for each in others]
            return at + 1, outputs.write(at, self._block(at, rows, key, value, more))

        _, outputs = self._loop(step, (0, outputs))
        return self._joined(outputs, 1)

    def backward(self, given: Sequence[tf.Tensor], upstream: tf.Tensor) -> list[tf.Tensor]:
        """The gradients of what was given."""
        # Along which axis a value is cut by blocks; the gradients of the others add up.
        axes = [1, None, None, *(2 if _has_rows(each) else None for each in given[3:])]
        values = [each if axis is None else self._padded(each, axis) for each, axis in zip(given, axes, strict=True)]
        upstream = self._padded(upstream, 1)

        def start(each: tf.Tensor, axis: int | None) -> tf.TensorArray | tf.Tensor:
            if axis is not None:
                return tf.TensorArray(each.dtype, size=self._count)
            return tf.zeros(tf.shape(each), _wide(each.dtype))  # sums in 16 bits would lose what one sum does not

        def step(at, state):
            pieces = [
                each if axis is None else self._rows(each, at, axis) for each, axis in zip(values, axes, strict=True)
            ]
            with tf.GradientTape() as tape:
                tape.watch(pieces)
                output = self._block(at, *pieces[:3], pieces[3:])
            found = tape.gradient(output, pieces, self._rows(upstream, at, 1))
            return at + 1, [
                kept + tf.cast(each, kept.dtype) if axis is None else kept.write(at, each)
                for kept, each, axis in zip(state, found, axes, strict=True)
            ]

        _, state = self._loop(step, (0, [start(each, axis) for each, axis in zip(given, axes, strict=True)]))
        return [
            tf.cast(kept, each.dtype) if axis is None else self._joined(kept, axis)
            for kept, each, axis in zip(state, given, axes, strict=True)
        ]

    def _loop(self, step, state):
        """Runs a step for each block, one after another, so that the scores of one are there at a time."""
        return tf.while_loop(
            lambda at, *_: at < self._count, step, state, parallel_iterations=1, maximum_iterations=self._count
        )

    def _padded(self, value: tf.Tensor, axis: int) -> tf.Tensor:
        """Whole blocks along an axis, the last one filled up; a value that is the same for all queries stays."""
        if axis == 2 and not _has_rows(value):
            return value
        if isinstance(self._padding, int) and not self._padding:
            return value
        widths = [[0, self._padding if at == axis else 0] for at in range(value.shape.rank)]
        return tf.pad(value, widths)

    def _rows(self, value: tf.Tensor, at, axis: int) -> tf.Tensor:
        """The rows of a block."""
        if axis == 2 and not _has_rows(value):
            return value
        shape = tf.shape(value)  # XLA needs the size of a slice as a constant, which `value[begin:end]` has not
        begin = [at * self._size if axis == other else 0 for other in range(value.shape.rank)]
        size = [self._size if axis == other else shape[other] for other in range(value.shape.rank)]
        found = tf.slice(value, begin, size)
        found.set_shape([*value.shape[:axis], self._size, *value.shape[axis + 1 :]])
        return found

    def _joined(self, blocks: tf.TensorArray, axis: int) -> tf.Tensor:
        """The blocks one after another along an axis, without what filled up the last."""
        stacked = blocks.stack()
        order = [*range(1, axis + 1), 0, *range(axis + 1, stacked.shape.rank)]
        stacked = tf.transpose(stacked, order)
        shape = tf.shape(stacked)
        whole = tf.reshape(stacked, tf.concat([shape[:axis], [self._count * self._size], shape[axis + 2 :]], 0))
        return whole[(slice(None),) * axis + (slice(self._length),)]


def _of_heads(shard: object) -> object:
    """What a device draws of scores [batch, heads, queries, keys]; a tensor-parallel one has some of the features."""
    is_of_features = isinstance(shard, rng.DrawShard) and shard.axis == -1
    return dataclasses.replace(shard, axis=-3) if is_of_features else shard


class Blocks(Loop):
    """One call of `attention`, whose arguments it takes.

    Args:
        size: queries in a block.
        skips_later_keys: a causal block may leave out the keys behind it, of which dropout then draws nothing.
    """

    def __init__(self, query, key, *, masks, scale, soft_cap=None, dropout=None, size, skips_later_keys=True):
        super().__init__(query, size=size)
        self._masks, self._scale, self._soft_cap, self._dropout = masks, scale, soft_cap, dropout
        self._keys = tf.shape(key)[1] if key.shape[1] is None else key.shape[1]
        # A query whose keys are all masked gives all of them the same weight, also those behind it.
        others = (masks.queries, masks.pairs, masks.rows, masks.window)
        only_causal = masks.is_causal and not masks.keys and all(each is None for each in others)
        # XLA needs one size for all blocks.
        self._skips_later_keys = skips_later_keys and only_causal and not step_context.is_in_xla()

    def _block(self, at, query, key, value, bias: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output for one block of queries, as Keras computes it for all."""
        keys = self._keys
        if self._skips_later_keys:
            keys = tf.minimum(keys, self._masks.first_query + (at + 1) * self._size)
            key, value = key[:, :keys], value[:, :keys]
            bias = [each if each.shape[3] == 1 else each[..., :keys] for each in bias]
        scores = tf.cast(tf.einsum("BTNH,BSNH->BNTS", query, key), _wide(query.dtype))
        scores *= tf.cast(self._scale, scores.dtype)
        for each in bias:
            scores += tf.cast(each, scores.dtype)
        if self._soft_cap is not None:
            scores = self._soft_cap * tf.tanh(scores / self._soft_cap)
        allowed = self._allowed(at, keys)
        if allowed is not None:
            scores = tf.where(allowed, scores, tf.constant(-0.7 * 3.38953e38, scores.dtype))
        chances = tf.nn.softmax(scores)
        if allowed is not None and self._masks.empty_gives_zero:
            chances = tf.where(allowed, chances, 0)
        chances = tf.cast(chances, key.dtype)
        if self._dropout is not None:
            seed = _Seed(block_seed(self._dropout.seed, at + self._dropout.first_block))
            with step_context.scope(draw_shard=_of_heads(step_context.current().draw_shard)):
                chances = keras.random.dropout(chances, self._dropout.rate, seed=seed)
        return tf.einsum("BNTS,BSNH->BTNH", chances, value)

    def _allowed(self, at, keys) -> tf.Tensor | None:
        """Which keys the queries of a block see: broadcastable to [batch, heads, queries, keys]; None for all."""
        masks, found = self._masks, [keys[:, None, None, :] for keys in self._masks.keys]
        if masks.queries is not None:
            found.append(self._rows(self._padded(masks.queries, 1), at, 1)[:, None, :, None])
        if masks.pairs is not None:
            found.append(self._rows(self._padded(masks.pairs, 2), at, 2))
        if masks.rows is not None:
            found.append(tf.cast(masks.rows(at * self._size, self._size), tf.bool)[:, None])
        if masks.is_causal or masks.window is not None:
            first = tf.cast(masks.first_query + at * self._size, tf.int64)  # a GPU compares int32 in host memory
            rows, columns = (tf.cast(tf.range(count), tf.int64) for count in (self._size, keys))
            rows, columns = first + rows[:, None], columns[None, :]
            if masks.is_causal:
                found.append((columns <= rows)[None, None])
            if masks.window is not None:
                found.append((tf.abs(rows - columns) < masks.window)[None, None])
        return functools.reduce(tf.logical_and, found) if found else None


class _Seed(keras.random.SeedGenerator):
    """A seed that is the same whenever it is asked for."""

    def __init__(self, seed: tf.Tensor):
        self._value = seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self._value


def block_seed(seed: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
    """The seed of a block; of the first one, the seed itself."""
    return seed + tf.stack([tf.zeros([], seed.dtype), tf.cast(at * 0x5851F42D, seed.dtype)])


def _has_rows(value: tf.Tensor) -> bool:
    """Whether a value is of [batch, heads, queries, keys] and differs by query."""
    return value.shape.rank == 4 and value.shape[2] != 1


def _wide(dtype: tf.DType) -> tf.DType:
    return dtype if dtype.size >= 4 else tf.float32
