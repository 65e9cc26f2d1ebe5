"""Random draws inside a replica: row i of the global batch gets the numbers that one device draws for it.

Stock Keras hands each replica's own shape to `tf.random.stateless_*` with the same seed, so all replicas draw
the numbers of the first rows: dropout masks repeat from replica to replica. Here a replica draws its rows'
part of the whole batch's.

Philox is counter-based. With the key and counter of a seed, group g of a draw comes from counter + g alone,
whatever the shape; a group is 4 numbers, or 2 of 64 bits. So a replica whose first number is the n-th of the
whole batch starts at counter + n // 4 and drops the first n % 4. This holds for uniform and integer draws in
every dtype, and for normal ones outside XLA (XLA pairs the numbers of a normal draw by its shape). XLA's
floats are other numbers than those of TensorFlow's kernels, on one device too: only runs that are both
compiled, or both not, can be equal.

The other distributions reject samples or depend on the draw's size: the whole batch is drawn and the
replica's rows are taken. That is always right, and costs every replica the whole batch's numbers.

Which draws are by example? A draw's first dimension is compared with the rows that the replica holds:

| first dimension | taken as |
|---|---|
| equal to the replica's rows | one row an example |
| a multiple of them, known only at run time or of a layer's input | rows flattened batch first |
| none; anything else; a plain number where the batch size is known only at run time | same on all replicas |

A layer's input that is made of weights alone is no batch, whatever its shape. A plain number that happens to be the
fixed number of rows is taken for it.

Draws that initialize variables are always the same on all replicas. In a hand-written `strategy.run` the rows are
those of the first tensor among its distributed arguments; where there is none, Keras is as it was.

Layers that mix the rows of a batch draw for all of it: see `mixing`. Not mended: under XLA, a draw whose seed is a
plain number and whose shape is fixed may be folded into a constant by TensorFlow's kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import standardize_dtype
from keras.src.backend.tensorflow import core
from keras.src.backend.tensorflow import random as backend
from keras.src.layers import AlphaDropout, GaussianDropout, GaussianNoise
from keras.src.random import seed_generator
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute.values import PerReplica
from tensorflow.python.framework import tensor_util

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, batch_sharding, replication, row_sums, step_context, trace_choices
from tfgpu.core.tensor_origin import CONSTANTS, DATA, WEIGHTS, origin_of

_PHILOX = 1


@dataclass(frozen=True)
class Part:
    """The part of one draw that falls to this replica. Integers where known, else int32 scalar tensors.

    Attributes:
        shape: the shape to hand back, int32 tensor.
        static: what is known of it while the graph is made.
        start: rows of the whole batch's draw before this replica's.
        local: rows of this replica's draw.
        total: rows of the whole batch's draw.
    """

    shape: tf.Tensor
    static: tf.TensorShape
    start: tf.Tensor
    local: tf.Tensor
    total: tf.Tensor


def find_part(shape, *, follows_input: bool = False) -> Part | None:
    """Which rows of the whole batch's draw are this replica's, or None where all replicas draw the same.

    Args:
        shape: of the replica's own draw: numbers, tensors or both, or one tensor.
        follows_input: the shape is that of a layer's input, so any multiple of the rows is by example.
    """
    rows = batch_rows.known_rows()
    if rows is None or step_context.current().draws_alike:
        return None
    shape = tf.convert_to_tensor(shape, tf.int32) if _is_plain(shape) else tf.cast(tf.stack(shape), tf.int32)
    static = tensor_util.constant_value_as_shape(shape)
    if static.rank == 0:
        return None
    follows_input = follows_input or step_context.current().draws_follow_input
    leading, held = static[0], _known(rows.local)
    if leading is not None and held is not None:
        if held == 0 or leading % held or not (leading == held or follows_input):
            return None
        times = leading // held
        return Part(shape, static, rows.offset * times, leading, rows.total * times)
    if leading is not None and not follows_input:
        return None  # a batch size that is known only at run time is no plain number
    leading, held = shape[0], tf.maximum(rows.local, 1)
    times = tf.where(leading % held == 0, leading // held, 0)
    return Part(shape, static, rows.offset * times, leading, tf.where(times > 0, rows.total * times, leading))


def _all_of(shape) -> Part:
    """A draw that is alike on all replicas, as a part that is all of it."""
    shape = tf.convert_to_tensor(shape, tf.int32) if _is_plain(shape) else tf.cast(tf.stack(shape), tf.int32)
    static = tensor_util.constant_value_as_shape(shape)
    rows = shape[0] if static[0] is None else static[0]
    return Part(shape, static, 0, rows, rows)


@dataclass(frozen=True)
class Slice:
    """A piece of what one device draws, along an axis that is no batch's: of a layer that lies on several devices.

    Attributes:
        axis: from the last, so negative.
        at: which piece, from 0.
        count: how many there are; they are equally large.
    """

    axis: int
    at: int
    count: int

    def uncut(self, part: Part) -> Part:
        """The draw that the piece is taken from."""
        rank = part.static.rank
        times = [self.count if axis == rank + self.axis else 1 for axis in range(rank)]
        static = [None if size is None else size * by for size, by in zip(part.static, times, strict=True)]
        return Part(part.shape * tf.constant(times), tf.TensorShape(static), part.start, part.local, part.total)

    def take(self, drawn: tf.Tensor, static: tf.TensorShape) -> tf.Tensor:
        """The piece of what was drawn."""
        return tf.ensure_shape(tf.split(drawn, self.count, self.axis)[self.at], static)


def slicing(cut: Slice):
    """For the length of the block dropout draws a piece of what one device draws."""
    return step_context.scope(draw_shard=cut)


def _part_of_input(inputs: tf.Tensor, shape) -> Part | None:
    """The part of a draw for a layer's input; weights alone get the same numbers on all replicas."""
    origin = origin_of(inputs)
    return None if origin == WEIGHTS else find_part(shape, follows_input=origin == DATA)


def draw(operation: Callable, part: Part, seed: tf.Tensor, dtype) -> tf.Tensor:
    """Draws this replica's rows by starting the counter at the group that holds their first number.

    Args:
        operation: `f(shape=, key=, counter=, alg=)`, a `StatelessRandom*V2` of a fixed group size.
        part: from `find_part`.
        seed: int32 of shape [2].
        dtype: of the numbers; decides how many of them a group has.
    """
    group = 2 if tf.as_dtype(dtype).size == 8 else 4
    each = part.static[1:].num_elements()
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def at(groups, shape):
        first = counter + tf.stack([tf.cast(groups, tf.uint64), tf.zeros([], tf.uint64)])
        return operation(shape=shape, key=key, counter=first, alg=_PHILOX)

    if each is not None and each % group == 0:
        out = at(tf.cast(part.start, tf.int64) * (each // group), part.shape)
    else:
        each = tf.reduce_prod(part.shape[1:]) if each is None else each
        first = tf.cast(part.start, tf.int64) * tf.cast(each, tf.int64)
        size = part.local * each
        # A whole group more than asked for: the size then does not depend on the offset, which XLA needs.
        numbers = at(first // group, [size + group])
        out = tf.reshape(tf.slice(numbers, [tf.cast(first % group, tf.int32)], [size]), part.shape)
    out.set_shape(part.static)
    return out


def take(operation: Callable, part: Part) -> tf.Tensor:
    """Draws the whole batch's numbers with `operation(shape)` and takes this replica's rows."""
    whole = operation(tf.concat([[part.total], part.shape[1:]], 0))
    out = whole[part.start : part.start + part.local]
    out.set_shape(part.static[:1].concatenate(out.shape[1:]))
    return out


def spread_rows(value, part: Part) -> tf.Tensor:
    """A parameter given for each of this replica's rows, among ones for the other replicas' rows."""
    dims = tf.TensorShape(getattr(value, "shape", None) or np.shape(value))
    if dims.rank != part.static.rank or dims[0] == 1:
        return value
    value = tf.convert_to_tensor(value)
    value = tf.broadcast_to(value, tf.concat([[part.local], tf.shape(value)[1:]], 0))
    edges = [[part.start, part.total - part.start - part.local]] + [[0, 0]] * (value.shape.rank - 1)
    return tf.pad(value, edges, constant_values=tf.ones([], value.dtype))


def draw_by_example() -> None:
    """Wraps the backend's ten random functions, and lets `strategy.run` tell a replica which rows it holds."""
    _wrap_run()
    _wrap_sliced()
    _wrap_taken()
    _wrap_shuffle()
    for layer in (GaussianNoise, GaussianDropout, AlphaDropout):

        @wrap(layer, "call")
        def call(stock, self, inputs, *args, **kwargs):
            origin = origin_of(inputs)
            with step_context.scope(
                **{"draws_alike" if origin == WEIGHTS else "draws_follow_input": origin != CONSTANTS}
            ):
                return stock(self, inputs, *args, **kwargs)

    @wrap(core.Variable, "_initialize_with_initializer")
    def initialize(stock, self, initializer):
        with step_context.scope(draws_alike=True):
            return stock(self, initializer)


def _wrap_run() -> None:
    @wrap(tf.distribute.Strategy, "run")
    def run(stock, self, fn, args=(), kwargs=None, options=None):
        given = tf.nest.flatten((args, kwargs or {}))
        is_distributed = [isinstance(v, PerReplica) for v in given]
        if not replication.is_replicated(self) or not any(is_distributed):
            return stock(self, fn, args, kwargs, options)
        # As `run` does; afterwards autograph has nothing left to convert.
        fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx(), convert_by_default=False)
        made = []

        @tf.autograph.experimental.do_not_convert
        def with_rows(*args, **kwargs):
            held = [v for v, is_own in zip(tf.nest.flatten((args, kwargs)), is_distributed, strict=True) if is_own]
            with batch_rows.given(batch_sharding.rows_of(held)), trace_choices.shared(made):
                return fn(*args, **kwargs)

        return stock(self, with_rows, args, kwargs, options)


def _wrap_sliced() -> None:
    raw = tf.raw_ops

    def uniform_part(part, minval, maxval, dtype, seed):
        minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
        numbers = draw(lambda **at: raw.StatelessRandomUniformV2(dtype=dtype, **at), part, seed, dtype)
        return numbers * (maxval - minval) + minval

    @wrap(backend, "uniform")
    def uniform(stock, shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, minval, maxval, dtype, seed)
        return uniform_part(part, minval, maxval, _name(dtype), _seed(seed))

    @wrap(backend, "normal")
    def normal(stock, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, mean, stddev, dtype, seed)
        dtype = _name(dtype)
        if step_context.is_in_xla():
            numbers = take(lambda whole: stock(whole, 0.0, 1.0, dtype, seed), part)
        else:
            numbers = draw(lambda **at: raw.StatelessRandomNormalV2(dtype=dtype, **at), part, _seed(seed), dtype)
        return numbers * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)

    @wrap(backend, "randint")
    def randint(stock, shape, minval, maxval, dtype="int32", seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, minval, maxval, dtype, seed)
        drawn = standardize_dtype(dtype) if standardize_dtype(dtype) in ("int32", "int64") else "int64"
        ends = {"minval": tf.convert_to_tensor(minval, drawn), "maxval": tf.convert_to_tensor(maxval, drawn)}
        numbers = draw(lambda **at: raw.StatelessRandomUniformIntV2(**ends, **at), part, _seed(seed), drawn)
        return tf.cast(numbers, dtype)

    @wrap(backend, "dropout")
    def dropout(stock, inputs, rate, noise_shape=None, seed=None):
        cut = step_context.current().draw_shard
        if rate in (0.0, 1.0) or (batch_rows.known_rows() is None and cut is None):
            return stock(inputs, rate, noise_shape, seed)
        inputs = tf.convert_to_tensor(inputs)
        shape = backend._get_concrete_noise_shape(inputs, noise_shape)
        part = _part_of_input(inputs, shape)
        if part is None and cut is None:
            return stock(inputs, rate, noise_shape, seed)
        part, seed = part or _all_of(shape), _seed(seed)

        def sampler(shape, dtype):
            if cut is None:
                return uniform_part(part, 0, 1, dtype, seed)
            return cut.take(uniform_part(cut.uncut(part), 0, 1, dtype, seed), part.static)

        return tf.nn.experimental.general_dropout(inputs, rate=rate, noise_shape=part.shape, uniform_sampler=sampler)


def _wrap_taken() -> None:
    @wrap(backend, "truncated_normal")
    def truncated_normal(stock, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, mean, stddev, dtype, seed)
        numbers = take(lambda whole: stock(whole, 0.0, 1.0, dtype, seed), part)
        return numbers * tf.convert_to_tensor(stddev, numbers.dtype) + tf.convert_to_tensor(mean, numbers.dtype)

    @wrap(backend, "gamma")
    def gamma(stock, shape, alpha, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, alpha, dtype, seed)
        return take(lambda whole: stock(whole, spread_rows(alpha, part), dtype, seed), part)

    @wrap(backend, "binomial")
    def binomial(stock, shape, counts, probabilities, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, counts, probabilities, dtype, seed)
        counts, probabilities = spread_rows(counts, part), spread_rows(probabilities, part)
        return take(lambda whole: stock(whole, counts, probabilities, dtype, seed), part)

    @wrap(backend, "beta")
    def beta(stock, shape, alpha, beta, dtype=None, seed=None):
        part = find_part(shape)
        if part is None:
            return stock(shape, alpha, beta, dtype, seed)
        return take(lambda whole: stock(whole, spread_rows(alpha, part), spread_rows(beta, part), dtype, seed), part)

    @wrap(backend, "categorical")
    def categorical(stock, logits, num_samples, dtype="int64", seed=None):
        logits = tf.convert_to_tensor(logits)
        part = _part_of_input(logits, tf.shape(logits))
        if part is None:
            return stock(logits, num_samples, dtype, seed)
        return take(lambda whole: stock(spread_rows(logits, part), num_samples, dtype, seed), part)


def _wrap_shuffle() -> None:
    @wrap(backend, "shuffle")
    def shuffle(stock, x, axis=0, seed=None):
        x = tf.convert_to_tensor(x)
        part = find_part(tf.shape(x)) if axis in (0, -x.shape.rank) else None
        if part is None:
            return stock(x, axis, seed)
        # A row may go to any replica, so all rows must come together. The order is drawn for places: whole numbers.
        order = stock(tf.range(part.total), 0, seed)
        return tf.ensure_shape(row_sums.own_rows(tf.gather(row_sums.all_rows(x), order), x), x.shape)


def same_on_all_replicas():
    """For the length of the block every replica draws what one device draws for the shape that it asks for."""
    return step_context.scope(draws_alike=True)


def _seed(seed) -> tf.Tensor:
    return backend._cast_seed(seed_generator.draw_seed(seed))


def _name(dtype) -> str:
    return standardize_dtype(dtype or keras.config.floatx())


def _known(rows: tf.Tensor) -> int | None:
    """The rows if the graph's maker knows them; TensorFlow forgets `tf.shape(x)[0]` of a (4, None) tensor."""
    value = tf.get_static_value(rows)
    if value is None and not hasattr(rows, "numpy") and rows.op.type == "StridedSlice":
        return tensor_util.constant_value_as_shape(rows.op.inputs[0])[0]
    return None if value is None else int(value)


def _is_plain(shape) -> bool:
    return isinstance(shape, (tf.Tensor, tf.TensorShape)) or not any(tf.is_tensor(size) for size in shape)
