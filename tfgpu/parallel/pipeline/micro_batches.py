"""A batch in micro-batches by rows, and back."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf
from keras.src import backend

from tfgpu.core import batch_rows, step_context


class MicroBatches:
    """A batch in micro-batches, by rows; they differ by one row at most.

    A micro-batch without rows, where the batch is too small for so many, gets one that stands in, and is left out.
    """

    def __init__(self, rows, count: int):
        self._rows, self._count = rows, count

    def bounds(self, micro: int) -> tuple:
        """Where a micro-batch begins, and how many rows it has: numbers, or int32 scalars."""
        begin = micro * self._rows // self._count
        return begin, (micro + 1) * self._rows // self._count - begin

    def cut(self, value, micro: int):
        begin, length = self.bounds(micro)
        if isinstance(length, int) and length:
            return value[begin : begin + length]
        begin, length = tf.minimum(begin, self._rows - 1), tf.maximum(length, 1)
        return value[begin : begin + length]

    def join(self, pieces: list) -> tf.Tensor:
        return tf.concat([piece[: self.bounds(micro)[1]] for micro, piece in enumerate(pieces)], 0)

    def part(self, value, micro: int):
        """A micro-batch's part of what belongs to the joined batch; zeros for a row that stands in."""
        begin, length = self.bounds(micro)
        if isinstance(length, int) and length:
            return value[begin : begin + length]
        mine = value[begin : begin + length]
        return tf.concat([mine, tf.zeros_like(value[: 1 - tf.minimum(length, 1)])], 0)

    def counted(self, micro: int, value: tf.Tensor) -> tf.Tensor:
        """What a micro-batch adds to a count: nothing, where it has but a row that stands in."""
        return tf.where(tf.convert_to_tensor(self.bounds(micro)[1]) > 0, value, tf.zeros_like(value))

    def share(self, micro: int, dtype) -> tf.Tensor:
        return tf.cast(self.bounds(micro)[1], dtype) / tf.cast(tf.maximum(self._rows, 1), dtype)

    @contextlib.contextmanager
    def standing_in(self, micro: int):
        """Random draws in the block are those of the micro-batch's rows of the whole batch."""
        begin, length = self.bounds(micro)
        rows, facts = batch_rows.known_rows(), step_context.step()
        offset, total = (rows.offset, rows.total) if rows is not None else (0, self._rows)
        mine = step_context.RowRange(_scalar(length), _scalar(offset + begin), _scalar(total))
        facts = step_context.Step(mine, tf.constant(1.0)) if facts is None else replace(facts, rows=mine)
        with step_context.scope(step=facts):
            yield


def masked_like(value, change: Callable):
    """What `change` makes of a tensor, with what it makes of the tensor's mask, if it has one."""
    mask, made = backend.get_keras_mask(value), change(value)
    if mask is not None:
        backend.set_keras_mask(made, change(mask))
    return made


def _scalar(value) -> tf.Tensor:
    return tf.convert_to_tensor(value, tf.int32)
