"""The cross-entropy of a large vocabulary by chunks of rows: the logits of all rows are never there at once.

A chunk's logits are computed, its losses are kept and the logits are not. The backward pass computes them again and
adds up the gradients of the weights over the chunks, in 32 bits. Each row's softmax is whole, so the losses are those
of the whole logits, and the gradients but for the order of their sums.

Sources: P.-L. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv:2410.10989 (chunks of
rows); E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv:2411.09009 (logits computed
again in the backward pass).
"""

import functools
import itertools
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import logits
from tfgpu.losses import heads
from tfgpu.losses.heads import Head

NUMBERS = 2**24
"""Logits in a chunk, unless its rows are given: 64 MiB in 32 bits."""
LEAST_ROWS = 256
"""In a chunk, unless they are given: each chunk reads and writes the gradient of all weights.

With 256,000 classes on an H100, chunks of 65 rows take 1.8 times (float32) to 2.0 times (mixed_bfloat16) as long as
those of 262, and save 200 MiB of 1,400 or nothing (`python -m benchmarks.gpu_first --checks vocabulary`).
"""


@dataclass(frozen=True)
class RowLosses:
    """What is known of all rows without their logits.

    Attributes:
        target: int64 [...], the classes.
        smoothing: of the labels.
        losses: float [...], the cross-entropy of each row.
        best: int64 [...], the class with the largest logit.
    """

    target: tf.Tensor
    smoothing: float
    losses: tf.Tensor
    best: tf.Tensor


def compute(
    head: Head, target: tf.Tensor, dtype: tf.DType, *, smoothing: float = 0.0, size: int | None = None
) -> RowLosses:
    """The cross-entropy of each row.

    Args:
        head: made the logits.
        target: integers [...], the class of each row.
        dtype: of the losses, and of the softmax.
        smoothing: the share of each label that all classes get in equal parts.
        size: rows in a chunk; None takes as many as give `NUMBERS` logits, but `LEAST_ROWS` at least.
    """
    shape, width = tf.shape(target), head.inputs.shape[-1]
    flat = tf.reshape(head.inputs, [-1, width])
    weights, are_trained = zip(*head.weights(), strict=True)
    size = size or max(LEAST_ROWS, NUMBERS // head.vocabulary)
    run = _Chunks(head, tf.reshape(target, [-1]), flat, dtype, smoothing, size, are_trained)

    @tf.custom_gradient
    def whole(*given):
        return run.forward(*given), lambda losses, best: run.backward(given, losses)

    losses, best = (tf.reshape(each, shape) for each in whole(flat, *weights))
    for each in (losses, best):
        each.set_shape(target.shape)
    return RowLosses(target, smoothing, losses, best)


@functools.cache
def give_to_metrics() -> None:
    """Gives `keras.ops.argmax` and the sparse cross-entropy, which metrics use, what a chunked loss has computed."""

    @wrap("numpy.argmax")
    def argmax(stock, x, axis=None, keepdims=False):
        head = heads.find(x)
        if head is None or not head.rows or keepdims or axis not in (-1, len(x.shape) - 1):
            return stock(x, axis, keepdims)
        return tf.cast(head.rows[0].best, tf.int32)

    @wrap("nn.sparse_categorical_crossentropy")
    def sparse(stock, target, output, from_logits=False, axis=-1):
        head = heads.find(output)
        if head is None or not head.rows or not from_logits or axis not in (-1, len(output.shape) - 1):
            return stock(target, output, from_logits, axis)
        target = tf.convert_to_tensor(target)
        if len(target.shape) == len(output.shape) and target.shape[-1] == 1:
            target = tf.squeeze(target, -1)
        origin = logits.origin(target)
        for rows in head.rows:
            if logits.origin(rows.target) is origin and not rows.smoothing:
                return tf.cast(rows.losses, output.dtype)
        rows = compute(head, tf.cast(target, tf.int64), output.dtype)
        head.rows.append(rows)
        return rows.losses


class _Chunks:
    """One pass over all rows."""

    def __init__(self, head: Head, target: tf.Tensor, rows: tf.Tensor, dtype, smoothing: float, size: int, are_trained):
        self._head, self._dtype, self._smoothing, self._are_trained = head, dtype, smoothing, are_trained
        length = rows.shape[0] if rows.shape[0] is not None else target.shape[0]
        self._size = min(size, length) if length else size
        self._length = tf.shape(rows)[0] if length is None else length
        self._count = -(-self._length // self._size)
        self._padding = self._count * self._size - self._length
        self._target = self._padded(target)

    def forward(self, rows: tf.Tensor, *weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses and the best classes, [rows] each."""
        rows, weights = self._padded(rows), [self._head.cast(each) for each in weights]
        arrays = [tf.TensorArray(dtype, self._count, element_shape=[self._size]) for dtype in (self._dtype, tf.int64)]

        def step(at, losses, best):
            logits = self._logits(self._chunk(rows, at), weights)
            losses = losses.write(at, self._losses(logits, self._chunk(self._target, at)))
            return at + 1, losses, best.write(at, tf.argmax(logits, -1))

        _, *arrays = self._loop(step, (0, *arrays))
        return tuple(tf.reshape(array.stack(), [-1])[: self._length] for array in arrays)

    def backward(self, given: tuple[tf.Tensor, ...], upstream: tf.Tensor) -> list[tf.Tensor | None]:
        """The gradients of the rows and of the weights; None for frozen weights."""
        rows, weights = self._padded(given[0]), [self._head.cast(each) for each in given[1:]]
        upstream, width = self._padded(upstream), given[0].shape[-1]
        array = tf.TensorArray(rows.dtype, self._count, element_shape=[self._size, width])
        trained = list(itertools.compress(weights, self._are_trained))
        stored = list(itertools.compress(given[1:], self._are_trained))
        sums = [tf.zeros(tf.shape(each), each.dtype if each.dtype.size >= 4 else tf.float32) for each in stored]

        def step(at, array, sums):
            chunk = self._chunk(rows, at)
            with tf.GradientTape() as tape:
                tape.watch([chunk, *trained])
                losses = self._losses(self._logits(chunk, weights), self._chunk(self._target, at))
            of_rows, *of_weights = tape.gradient(losses, [chunk, *trained], self._chunk(upstream, at))
            added = [total + tf.cast(each, total.dtype) for total, each in zip(sums, of_weights, strict=True)]
            return at + 1, array.write(at, of_rows), added

        _, array, sums = self._loop(step, (0, array, sums))
        of_rows = tf.reshape(array.stack(), [-1, width])[: self._length]
        of_trained = iter([tf.cast(total, each.dtype) for total, each in zip(sums, stored, strict=True)])
        return [of_rows, *(next(of_trained) if is_trained else None for is_trained in self._are_trained)]

    def _logits(self, rows: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        return tf.cast(self._head.logits(self._head.cast(rows), *weights), self._dtype)

    def _losses(self, logits: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
        if not self._smoothing:
            return losses
        own = tf.gather(logits, target, batch_dims=1)
        return losses + self._smoothing * (own - tf.reduce_mean(logits, -1))

    def _loop(self, step, state):
        """Runs a step for each chunk, one after another, so that the logits of one are there at a time."""
        return tf.while_loop(
            lambda at, *_: at < self._count, step, state, parallel_iterations=1, maximum_iterations=self._count
        )

    def _padded(self, value: tf.Tensor) -> tf.Tensor:
        """Whole chunks of rows, the last one filled up."""
        if isinstance(self._padding, int) and not self._padding:
            return value
        return tf.pad(value, [[0, self._padding], *([0, 0] for _ in value.shape[1:])])

    def _chunk(self, value: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        return tf.slice(value, [at * self._size, *(0 for _ in value.shape[1:])], [self._size, *value.shape[1:]])
