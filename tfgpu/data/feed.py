"""From ordered examples to batches: fetch, batch, change, prefetch.

Each dataset is registered with a way to make one worker's rows of its batches alone (`tfgpu.core.worker_rows`): of a
batch's indices only the worker's rows are read, decoded and augmented. Order and random numbers depend on the seed, the
epoch and the place in it, so the rows are those of the whole batch, to the bit. Stages that mix examples need the
partners of the rows too (`EpochSpec.needed`), which are fetched and dropped.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.core.feed import reach
from tfgpu.core.worker_rows import Ranges
from tfgpu.data.epoch import EpochSpec
from tfgpu.data.position import Counter, parted
from tfgpu.errors import whole_number

_BATCHES_AHEAD = 4  # of examples that are far away


@dataclass(frozen=True)
class Feed:
    """How batches are prepared ahead of training; their content stays the same.

    Attributes:
        parallel_calls: how many examples are read and decoded, or batches augmented, in parallel; None: tf.data tunes
            it.
        prefetch: batches to prefetch; None: tf.data tunes it; 0: none.
    """

    parallel_calls: int | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("parallel_calls", 1), ("prefetch", 0)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=least)

    @property
    def calls(self) -> int:
        """The `num_parallel_calls` argument of `map`."""
        return self.parallel_calls or tf.data.AUTOTUNE


def batches(
    spec: EpochSpec, epochs: tf.data.Dataset, feed: Feed, *, next_epoch: Callable[[], int] = lambda: 0
) -> tf.data.Dataset:
    """Turns one element, the number of an epoch, into that epoch's batches.

    Examples in memory are fetched by rows of indices: batching single examples, or a dataset nested in `flat_map`,
    makes an epoch two to three times as slow (measured; noticeable with steps of 100 us).

    Args:
        spec: what the batches are made of.
        epochs: a dataset of that one element, an int64 scalar.
        feed: how batches are prepared ahead.
        next_epoch: the number of the epoch that the next iteration reads.
    """

    def rows(position):
        epoch, first = _begun(position, spec.steps)
        _, starts, indices = rows_of(epoch, spec.order(epoch), spec.count, spec.global_batch)
        return tf.repeat(position, spec.steps - first), starts[first:], indices[first:]

    if spec.examples.load is not None:
        make = functools.partial(_loaded, spec, feed)
    else:
        with tf.device("CPU:0"):
            array = spec.examples.held()

        def make(described, ranges):
            return described.map(_in_memory(spec, array, ranges), num_parallel_calls=feed.calls)

    return _registered(make, epochs, rows, spec.steps, feed, next_epoch, rewrites=spec.examples.load is not None)


def by_rows(
    counter: Counter, rows: Callable, fetch: Callable, total: Callable, steps: int, feed: Feed
) -> tf.data.Dataset:
    """Makes an epoch's batches from rows that describe one batch each.

    Args:
        counter: of the epochs.
        rows: maps the number of an epoch to tensors of `steps` rows.
        fetch: maps one row of each to the batch; `fetch(..., own=rows)` makes the rows `rows` (int64) of it alone.
        total: maps one row of each to the number of examples in the batch.
        steps: the number of batches.
        feed: how batches are prepared ahead.
    """

    def rows_from(position):
        epoch, first = _begun(position, steps)
        return tuple(each[first:] for each in rows(epoch))

    def make(described, ranges):
        def fetch_own(*row):
            return fetch(*row, own=ranges.indices(total(*row))), tf.cast(total(*row), tf.int32)

        return described.map(fetch if ranges is None else fetch_own, num_parallel_calls=feed.calls)

    return _registered(make, counter.positions(), rows_from, steps, feed, lambda: counter.next)


def _registered(
    make: Callable, epochs, rows: Callable, steps: int, feed: Feed, next_epoch: Callable[[], int], *, rewrites=False
) -> tf.data.Dataset:
    """The whole batches, registered with a way to make one worker's rows of them.

    Args:
        make: maps a dataset of the rows that describe the batches, and `ranges`, to `(rows, total)`, or to the batches
            if `ranges` is None.
        epochs, feed, next_epoch: as for `batches`.
        rows, steps: as for `by_rows`.
        rewrites: as for `finish`.
    """

    def finished(ranges):
        return finish(make(epochs.map(rows).unbatch(), ranges), steps, feed, rewrites=rewrites)

    def first():
        epoch = tf.data.Dataset.from_tensors(np.int64(next_epoch()))
        return next(iter(make(epoch.map(rows).unbatch().take(1), None)))

    return worker_rows.register(finished(None), worker_rows.WorkerRows(finished, first))


def rows_of(epoch, indices, count: int, global_batch: int):
    """Splits an epoch's indices into one row per batch, the last one padded: epochs, first positions, indices."""
    steps = -(-count // global_batch)
    padded = tf.pad(indices, [[0, steps * global_batch - count]])
    starts = tf.range(0, count, global_batch, dtype=tf.int64)
    return tf.repeat(epoch, steps), starts, tf.reshape(padded, [steps, global_batch])


def finish(made: tf.data.Dataset, steps: int, feed: Feed, *, rewrites: bool = False) -> tf.data.Dataset:
    """Sets the number of batches and how they are prepared ahead; the last stage of every pipeline.

    Args:
        made: the batches.
        steps: the number of batches.
        feed: how they are prepared ahead.
        rewrites: let tf.data optimize its graph. It fuses loading and batching, which saves a copy of each example, but
            starts an iteration 25% more slowly (measured), which matters for short epochs.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_optimization.apply_default_optimizations = rewrites
    # All workers have the same global batches, of which each gets its rows: files would be divided unevenly.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    made = _of_length(made, steps)
    if feed.prefetch != 0:
        made = made.prefetch(feed.prefetch or tf.data.AUTOTUNE)
    return made.with_options(options)


def _begun(position: tf.Tensor, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The epoch and the first batch of an iteration, at most the number of batches."""
    epoch, first = parted(position)
    return epoch, tf.minimum(first, steps)


def _of_length(made: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """Declares the length of a dataset, although an iteration that begins later has fewer elements.

    `assert_cardinality` raises an error in such an iteration. Here a second dataset, which is never read, makes the
    length of both together infinite, so that the length of `take` is known.
    """
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(made.element_spec)):
        return made.apply(tf.data.experimental.assert_cardinality(steps))

    def empty(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([side or 0 for side in spec.shape], spec.dtype)

    never = tf.data.Dataset.from_tensors(0).map(lambda _: tf.nest.map_structure(empty, made.element_spec)).repeat()
    always_first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    chosen = tf.data.Dataset.choose_from_datasets([made, never], always_first, stop_on_empty_dataset=True)
    reach.keep_reach(chosen, made)  # TensorFlow cannot see that `always_first` has no effects
    return chosen.take(steps)


def _in_memory(spec: EpochSpec, array: tf.Tensor, ranges: Ranges | None = None) -> Callable:
    """The function from a batch's row of indices to the batch, or to `(rows, total)`, for examples in memory."""

    def fetch(position, start, row):
        epoch, _ = parted(position)
        index = row[: spec.count - start]  # the last row may be padded
        if ranges is not None:
            index = tf.gather(index, spec.needed(epoch, start, ranges))
        x = tf.ensure_shape(tf.gather(array, index), [None, *array.shape[1:]])
        return spec.made(epoch, start, x, index, ranges)

    return fetch


def _loaded(spec: EpochSpec, feed, rows: tf.data.Dataset, ranges: Ranges | None = None) -> tf.data.Dataset:
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
    load, most, pads = spec.examples.load, _most(spec, ranges), ranges is not None and spec.pairs > 0

    def keys(position, start, row):
        needed = spec.needed(parted(position)[0], start, ranges)
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
        return spec.made(epoch, start, x, key[:, 2], ranges)

    def expected(number):
        start = number * spec.global_batch
        size = most if pads else tf.size(spec.needed(None, start, ranges), tf.int64)
        return number * most + tf.range(size, dtype=tf.int64)

    def index(epoch, number):
        start = number // most * spec.global_batch
        row = spec.order(epoch)[start : start + spec.global_batch]
        return keys(epoch, start, row)[number % most, 2]

    batches = rows.map(keys)
    if spec.examples.ahead is not None:
        batches = _fetched_ahead(batches, spec.examples.ahead, 2)
    load_one = _unless_padding(load) if pads else lambda key: (key, load(key[2]))
    read = batches.unbatch().map(load_one, num_parallel_calls=feed.calls, deterministic=True)
    if spec.examples.where is None:
        cut = read.batch(most)
    else:
        whole = read.ignore_errors().batch(most)
        cut = _corrupt_named(whole, expected=expected, index=index, where=spec.examples.where)
    return cut.map(assemble, num_parallel_calls=feed.calls, deterministic=True)


def _most(spec: EpochSpec, ranges: Ranges | None) -> int:
    """The most examples that a batch takes: each stage that mixes may double a worker's."""
    if ranges is None:
        return spec.global_batch
    with tf.init_scope():
        own = int(tf.size(ranges.indices(tf.constant(spec.global_batch, tf.int64))))
    return min(spec.global_batch, own * 2**spec.pairs) if spec.pairs else own


def _unless_padding(load: Callable) -> Callable:
    """Loads the example of a key; zeros of its shape where the key is padding."""
    spec = tf.data.Dataset.range(1).map(load).element_spec

    def one(key):
        return key, tf.cond(key[2] >= 0, lambda: load(key[2]), lambda: tf.zeros(spec.shape, spec.dtype))

    return one


def _fetched_ahead(batches: tf.data.Dataset, ahead: Callable, column: int) -> tf.data.Dataset:
    """Begins to fetch the examples of some batches of keys in advance.

    Args:
        batches: int64 [n, columns], the keys of a batch's examples.
        ahead: maps indices (int64 [n]) to a tensor, and begins to fetch those examples.
        column: which column holds the index; a negative one stands for no example.
    """

    def begin(key):
        index = key[:, column]
        with tf.control_dependencies([ahead(tf.boolean_mask(index, index >= 0))]):
            return tf.identity(key)

    return batches.map(begin).prefetch(_BATCHES_AHEAD)


def _corrupt_named(cut: tf.data.Dataset, *, expected: Callable, index: Callable, where: Callable) -> tf.data.Dataset:
    """Stops at the first gap in the numbers of the examples, where a corrupt one was dropped, and names it.

    Catching the error per example, in a dataset of one, costs ten times as much as decoding a JPEG (measured); finding
    a gap costs nothing.

    Args:
        cut: batches `(key, x)` of the examples that could be decoded. `key` is int64 [n, columns], the position with
            which the iteration began (`parted`) in the first column and the example's number in the epoch in
            the last.
        expected: maps a batch's number to the numbers of its examples, consecutive int64.
        index: maps the epoch and a number to the example's index.
        where: maps an index to the example's name.
    """

    def look(number, batch):
        key, x = batch
        epoch, first = parted(key[0, 0])
        wanted, got = expected(first + number), key[:, -1]
        got = tf.pad(got, [[0, tf.size(wanted) - tf.size(got)]], constant_values=-1)
        missing = wanted[tf.argmax(got != wanted)]
        whole = tf.reduce_all(got == wanted)

        def stop():
            name = where(index(epoch, missing))
            with tf.control_dependencies([tf.debugging.Assert(whole, ["Corrupt:", name])]):
                return tf.identity(key)

        return tf.cond(whole, lambda: key, stop), x

    return cut.enumerate().map(look)
