"""One worker's rows of each global batch: of its indices only the worker's rows are read, decoded and augmented.

Order and random numbers depend on the seed, the epoch and the place in it, so the rows are those of the whole batch, to
the bit. Stages that mix examples need the partners of the rows too (`change.needed`), which are fetched and dropped.
"""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.core.worker_rows import Ranges
from tfgpu.data.assembly import corrupt
from tfgpu.data.assembly.ahead import fetched_ahead
from tfgpu.data.assembly.epoch_spec import EpochSpec, pairs
from tfgpu.data.examples import to_model
from tfgpu.data.position import parted


def in_memory(spec: EpochSpec, array: tf.Tensor, ranges: Ranges | None = None) -> Callable:
    """The function from a batch's row of indices to the batch, or to `(rows, total)`, for examples in memory."""

    def fetch(position, start, row):
        epoch, _ = parted(position)
        index = row[: spec.count - start]  # the last row may be padded
        if ranges is None:
            return spec.change(epoch, start, gathered(index), tf.gather(spec.labels, index))
        shard = spec.shard(start, ranges)
        index = tf.gather(index, spec.needed(epoch, start, shard))
        made = spec.change(epoch, start, gathered(index), tf.gather(spec.labels, index), shard)
        return made, tf.cast(shard.total, tf.int32)

    def gathered(index):
        return tf.ensure_shape(to_model(tf.gather(array, index)), [None, *array.shape[1:]])

    return fetch


def loaded(spec: EpochSpec, feed, rows: tf.data.Dataset, ranges: Ranges | None = None) -> tf.data.Dataset:
    """Batches, or `(rows, total)` of one worker, of examples that are read on demand.

    All examples of all batches form one stream, so that decoding runs in parallel across batches. Where stages mix
    examples, a worker's batches need different numbers of them: the stream is padded to the most, with keys that load
    nothing. A key is one tensor (position, place in the epoch, index, number in the stream), since each component of a
    dataset's elements costs some microseconds per example, compared with 300 for a small JPEG (measured).

    Args:
        spec: what the batches are made of.
        feed: how examples are prepared ahead.
        rows: one element per batch: the position of `Counter.positions`, the place of its first example, the indices.
        ranges: which rows are the worker's; None: all.
    """
    load, most = spec.examples.load, _most(spec, ranges)
    pads = ranges is not None and pairs(spec.change) > 0

    def keys(position, start, row):
        needed = _needed(spec, ranges, parted(position)[0], start)
        key = tf.stack([tf.fill(tf.shape(needed), position), start + needed, tf.gather(row, needed)], axis=1)
        if pads:
            key = tf.pad(key, [[0, most - tf.size(needed)], [0, 0]], constant_values=-1)
            key = tf.concat([tf.fill([most, 1], position), key[:, 1:]], axis=1)
        numbers = start // spec.global_batch * most + tf.range(tf.shape(key, tf.int64)[0])
        return tf.concat([key, numbers[:, None]], axis=1)

    def assemble(key, x):
        if pads:
            real = tf.math.count_nonzero(key[:, 2] >= 0)
            key, x = key[:real], x[:real]
        epoch, start = parted(key[0, 0])[0], key[0, 1] // spec.global_batch * spec.global_batch
        x, labels = to_model(x), tf.gather(spec.labels, key[:, 2])
        if ranges is None:
            return spec.change(epoch, start, x, labels)
        shard = spec.shard(start, ranges)
        return spec.change(epoch, start, x, labels, shard), tf.cast(shard.total, tf.int32)

    def expected(number):
        start = number * spec.global_batch
        size = most if pads else tf.size(_rows(spec, ranges, start), tf.int64)
        return number * most + tf.range(size, dtype=tf.int64)

    def index(epoch, number):
        start = number // most * spec.global_batch
        row = spec.order(epoch)[start : start + spec.global_batch]
        return keys(epoch, start, row)[number % most, 2]

    batches = rows.map(keys)
    if spec.examples.ahead is not None:
        batches = fetched_ahead(batches, spec.examples.ahead, 2)
    load_one = _unless_padding(load) if pads else lambda key: (key, load(key[2]))
    read = batches.unbatch().map(load_one, num_parallel_calls=feed.calls, deterministic=True)
    if spec.examples.where is None:
        cut = read.batch(most)
    else:
        whole = read.ignore_errors().batch(most)
        cut = corrupt.named(whole, expected=expected, index=index, where=spec.examples.where)
    return cut.map(assemble, num_parallel_calls=feed.calls, deterministic=True)


def _rows(spec: EpochSpec, ranges: Ranges | None, start: tf.Tensor) -> tf.Tensor:
    """The rows of a batch that are made."""
    return tf.range(spec.total(start)) if ranges is None else spec.shard(start, ranges).rows


def _needed(spec: EpochSpec, ranges: Ranges | None, epoch: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """The rows of a batch that are fetched."""
    if ranges is None:
        return _rows(spec, None, start)
    return spec.needed(epoch, start, spec.shard(start, ranges))


def _most(spec: EpochSpec, ranges: Ranges | None) -> int:
    """The most examples that a batch takes: each stage that mixes may double a worker's."""
    if ranges is None:
        return spec.global_batch
    with tf.init_scope():
        own = int(tf.size(ranges.indices(tf.constant(spec.global_batch, tf.int64))))
    return min(spec.global_batch, own * 2 ** pairs(spec.change)) if pairs(spec.change) else own


def _unless_padding(load: Callable) -> Callable:
    """Loads the example of a key; zeros of its shape where the key is padding."""
    spec = tf.data.Dataset.range(1).map(load).element_spec

    def one(key):
        return key, tf.cond(key[2] >= 0, lambda: load(key[2]), lambda: tf.zeros(spec.shape, spec.dtype))

    return one
