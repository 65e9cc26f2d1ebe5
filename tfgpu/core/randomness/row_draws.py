"""Random draws by row: a replica's part of the global batch's draw.

Philox is counter-based. With the key and counter of a seed, group g of a draw comes from counter + g alone,
whatever the shape; a group is 4 numbers, or 2 of 64 bits. So a replica whose first number is the n-th of the
global batch starts at counter + n // 4 and drops the first n % 4. This holds for uniform and integer draws in
every dtype, and for normal ones outside XLA (XLA pairs the numbers of a normal draw by its shape).

XLA makes other floats of the same bits than TensorFlow's kernels. A replica makes those of one device: XLA's if it
compiles one device's step, whether or not it compiles the replica's (`xla_numbers`).

The other distributions reject samples or depend on the draw's size: the global batch is drawn and the replica's rows
are taken. That is always correct, and every replica pays for the global batch's numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.tensorflow import tensor_util
from tfgpu.core import batch_rows, step_context
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.randomness.tensor_origin import DATA, WEIGHTS, origin_of


@dataclass(frozen=True)
class RowDraw:
    """This replica's rows of one draw: integers if known, else int32 scalar tensors.

    Attributes:
        shape: shape of this replica's rows, int32 tensor.
        static: the static part of the shape.
        start: number of rows of the global batch's draw before them.
        local: their number.
        total: number of rows of the global batch's draw.
    """

    shape: tf.Tensor
    static: tf.TensorShape
    start: tf.Tensor
    local: tf.Tensor
    total: tf.Tensor


@dataclass(frozen=True)
class DrawShard:
    """A piece of a draw along an axis other than the batch axis, for a layer that is split over devices.

    Attributes:
        axis: negative, counted from the last.
        at: index of the piece, from 0.
        count: number of pieces, all of one size.
    """

    axis: int
    at: int
    count: int

    def unsplit(self, rows: RowDraw) -> RowDraw:
        """The draw from which the piece is taken."""
        rank = rows.static.rank
        times = [self.count if axis == rank + self.axis else 1 for axis in range(rank)]
        static = [None if size is None else size * by for size, by in zip(rows.static, times, strict=True)]
        return RowDraw(rows.shape * tf.constant(times), tf.TensorShape(static), rows.start, rows.local, rows.total)

    def take(self, drawn: tf.Tensor, static: tf.TensorShape) -> tf.Tensor:
        """The piece of what was drawn."""
        return tf.ensure_shape(tf.split(drawn, self.count, self.axis)[self.at], static)


def are_as_xla(model: keras.Model) -> bool:
    """Whether a replica's random numbers are those that XLA makes, because it compiles the model's step on one device.

    Args:
        model: a compiled one.
    """
    is_compiled = model.jit_compile or slots.get(model, "one_device_compiles", False)
    return bool(is_compiled) and not model.run_eagerly


def held_rows() -> step_context.RowRange | None:
    """Which rows random draws are for: this replica's, or those that a piece of code is tried on."""
    return step_context.current().trial_rows or batch_rows.known_rows()


def of_shape(shape, *, follows_input: bool = False) -> RowDraw | None:
    """Which rows of the global batch's draw are this replica's, or None if all replicas draw the same.

    Args:
        shape: shape of the replica's own draw: numbers, tensors or both, or one tensor.
        follows_input: the shape is that of a layer's input, so any multiple of the rows is per example.
    """
    rows = held_rows()
    if rows is None or step_context.current().draws_alike:
        return None
    shape, static = _as_shape(shape)
    if static.rank == 0:
        return None
    follows_input = follows_input or step_context.current().draws_follow_input
    leading, held = static[0], _known(rows.local)
    if leading is not None and held is not None:
        per_example, rest = divmod(leading, held) if held else (0, 1)
        is_row = per_example == 1 and not rest
        if not follows_input:
            draw_sizes.note(leading, is_row=is_row)
            is_row = is_row and not draw_sizes.is_fixed(leading)
        if not (is_row or (follows_input and not rest)):
            return None
        return RowDraw(shape, static, rows.offset * per_example, leading, rows.total * per_example)
    if leading is not None and not follows_input:
        return None  # a Python number cannot be a batch size that is known only at run time
    leading, held = shape[0], tf.maximum(rows.local, 1)
    per_example = tf.where(leading % held == 0, leading // held, 0)
    total = tf.where(per_example > 0, rows.total * per_example, leading)
    return RowDraw(shape, static, rows.offset * per_example, leading, total)


def of_input(inputs: tf.Tensor, shape) -> RowDraw | None:
    """The rows of a draw for a layer's input; weights alone get the same numbers on all replicas."""
    origin = origin_of(inputs)
    return None if origin == WEIGHTS else of_shape(shape, follows_input=origin == DATA)


def of_all(shape) -> RowDraw:
    """A draw that is the same on all replicas."""
    shape, static = _as_shape(shape)
    rows = 1 if static.rank == 0 else shape[0] if static[0] is None else static[0]
    return RowDraw(shape, static, 0, rows, rows)


def draw(operation: Callable, rows: RowDraw, seed: tf.Tensor, dtype) -> tf.Tensor:
    """Draws this replica's rows by starting the counter at the group that holds their first number.

    Args:
        operation: `f(shape=, key=, counter=, alg=)`, a `StatelessRandom*V2` with a fixed group size.
        rows: which rows to draw.
        seed: int32 of shape [2].
        dtype: dtype of the numbers, which determines the group size.
    """
    group = 2 if tf.as_dtype(dtype).size == 8 else 4
    each = rows.static[1:].num_elements()
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def from_group(groups, shape):
        first = counter + tf.stack([tf.cast(groups, tf.uint64), tf.zeros([], tf.uint64)])
        return operation(shape=shape, key=key, counter=first, alg=tf.random.Algorithm.PHILOX.value)

    if each is not None and each % group == 0:
        out = from_group(tf.cast(rows.start, tf.int64) * (each // group), rows.shape)
    else:
        each = tf.reduce_prod(rows.shape[1:]) if each is None else each
        first = tf.cast(rows.start, tf.int64) * tf.cast(each, tf.int64)
        size = rows.local * each
        # One group more than needed, so that the size does not depend on the offset, as XLA requires.
        numbers = from_group(first // group, [size + group])
        out = tf.reshape(tf.slice(numbers, [tf.cast(first % group, tf.int32)], [size]), rows.shape)
    out.set_shape(rows.static)
    return out


def take(operation: Callable, rows: RowDraw) -> tf.Tensor:
    """Draws the global batch's numbers with `operation(shape)` and takes this replica's rows."""
    if rows.static.rank == 0:
        return operation(rows.shape)
    whole = operation(tf.concat([[rows.total], rows.shape[1:]], 0))
    begin = tf.concat([[rows.start], tf.zeros_like(tf.shape(whole)[1:])], 0)
    out = tf.slice(whole, begin, tf.concat([[rows.local], tf.shape(whole)[1:]], 0))
    out.set_shape(rows.static[:1].concatenate(out.shape[1:]))
    return out


def pad_rows(value, rows: RowDraw):
    """A per-row parameter of this replica, padded with ones for the other replicas' rows."""
    dims = tf.TensorShape(getattr(value, "shape", None) or np.shape(value))
    if dims.rank != rows.static.rank or dims[0] == 1:
        return value
    value = tf.convert_to_tensor(value)
    value = tf.broadcast_to(value, tf.concat([[rows.local], tf.shape(value)[1:]], 0))
    edges = [[rows.start, rows.total - rows.start - rows.local]] + [[0, 0]] * (value.shape.rank - 1)
    return tf.pad(value, edges, constant_values=tf.ones([], value.dtype))


def _as_shape(shape) -> tuple[tf.Tensor, tf.TensorShape]:
    """A shape as an int32 tensor, and its static part."""
    is_plain = isinstance(shape, (tf.Tensor, tf.TensorShape)) or not any(tf.is_tensor(size) for size in shape)
    shape = tf.convert_to_tensor(shape, tf.int32) if is_plain else tf.cast(tf.stack(shape), tf.int32)
    return shape, tensor_util.constant_value_as_shape(shape)


def _known(rows: tf.Tensor) -> int | None:
    """The static number of rows, if known; TensorFlow loses `tf.shape(x)[0]` of a (4, None)."""
    value = tf.get_static_value(rows)
    if value is None and not hasattr(rows, "numpy") and rows.op.type == "StridedSlice":
        return tensor_util.constant_value_as_shape(rows.op.inputs[0])[0]
    return None if value is None else int(value)
