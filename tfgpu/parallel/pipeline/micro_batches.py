"""Splits a batch into micro-batches by rows, and concatenates them again."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from tfgpu.compat.keras import get_mask, set_mask
from tfgpu.core import batch_rows, step_context
from tfgpu.core.row_mixing import own_layers


class MicroBatches:
    """The micro-batches of a batch: consecutive rows, whose counts differ by one at most.

    A batch with fewer rows than micro-batches leaves some of them empty. An empty micro-batch computes on one row of
    the batch as a placeholder, and its results are dropped.

    Args:
        rows: of the batch: a number, or an int32 scalar tensor.
        count: how many micro-batches.
    """

    def __init__(self, rows, count: int):
        self._rows, self._count = rows, count

    def bounds(self, micro: int) -> tuple:
        """The first row of a micro-batch and its number of rows: numbers, or int32 scalar tensors."""
        begin = micro * self._rows // self._count
        return begin, (micro + 1) * self._rows // self._count - begin

    def slice(self, value, micro: int):
        """A micro-batch's rows of `value`; one row for an empty micro-batch."""
        begin, length = self.bounds(micro)
        if isinstance(length, int) and length:
            return value[begin : begin + length]
        begin, length = tf.minimum(begin, self._rows - 1), tf.maximum(length, 1)
        return value[begin : begin + length]

    def concat(self, pieces: list) -> tf.Tensor:
        """The whole batch, from one tensor per micro-batch."""
        return tf.concat([piece[: self.bounds(micro)[1]] for micro, piece in enumerate(pieces)], 0)

    def slice_gradient(self, value, micro: int):
        """A micro-batch's rows of the gradient of what `concat` returned; zeros for a placeholder row."""
        begin, length = self.bounds(micro)
        if isinstance(length, int) and length:
            return value[begin : begin + length]
        own = value[begin : begin + length]
        return tf.concat([own, tf.zeros_like(value[: 1 - tf.minimum(length, 1)])], 0)

    def zero_if_empty(self, micro: int, value: tf.Tensor) -> tf.Tensor:
        """`value`, or zeros for an empty micro-batch."""
        return tf.where(tf.convert_to_tensor(self.bounds(micro)[1]) > 0, value, tf.zeros_like(value))

    def fraction(self, micro: int, dtype) -> tf.Tensor:
        """A micro-batch's rows as a fraction of the batch's."""
        return tf.cast(self.bounds(micro)[1], dtype) / tf.cast(tf.maximum(self._rows, 1), dtype)

    @contextlib.contextmanager
    def row_scope(self, micro: int):
        """Random draws in the block equal those of the micro-batch's rows in the whole batch."""
        begin, length = self.bounds(micro)
        rows, facts = batch_rows.known_rows(), step_context.step()
        offset, total = (rows.offset, rows.total) if rows is not None else (0, self._rows)
        own = step_context.RowRange(_scalar(length), _scalar(offset + begin), _scalar(total))
        facts = step_context.Step(own, tf.constant(1.0)) if facts is None else replace(facts, rows=own)
        with step_context.scope(step=facts), own_layers.as_they_are():  # `row_mixing` has tried them
            yield


def map_with_mask(value, change: Callable):
    """`change(value)`; if the tensor has a Keras mask, the result gets `change(mask)` as its mask."""
    mask, changed = get_mask(value), change(value)
    if mask is not None:
        set_mask(changed, change(mask))
    return changed


def _scalar(value) -> tf.Tensor:
    return tf.convert_to_tensor(value, tf.int32)
