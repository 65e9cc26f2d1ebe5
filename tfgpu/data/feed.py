"""From ordered examples to batches: fetch, batch, change, prefetch.

Each dataset is registered with a way to make one worker's rows of its batches alone (`tfgpu.core.worker_rows`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.core.feed import reach
from tfgpu.data.assembly import own_rows
from tfgpu.data.assembly.epoch_spec import EpochSpec
from tfgpu.data.position import parted
from tfgpu.errors import whole_number


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
        make = functools.partial(own_rows.loaded, spec, feed)
    else:
        with tf.device("CPU:0"):
            array = spec.examples.held()

        def make(described, ranges):
            return described.map(own_rows.in_memory(spec, array, ranges), num_parallel_calls=feed.calls)

    return _registered(make, epochs, rows, spec.steps, feed, next_epoch, rewrites=spec.examples.load is not None)


def by_rows(
    epochs: tf.data.Dataset,
    rows: Callable,
    fetch: Callable,
    total: Callable,
    steps: int,
    feed: Feed,
    *,
    next_epoch: Callable[[], int] = lambda: 0,
) -> tf.data.Dataset:
    """Makes an epoch's batches from rows that describe one batch each.

    Args:
        epochs: a dataset of one element, the number of an epoch.
        rows: maps it to tensors of `steps` rows.
        fetch: maps one row of each to the batch; `fetch(..., own=rows)` makes the rows `rows` (int64) of it alone.
        total: maps one row of each to the number of examples in the batch.
        steps: the number of batches.
        feed: how batches are prepared ahead.
        next_epoch: the number of the epoch that the next iteration reads.
    """

    def rows_from(position):
        epoch, first = _begun(position, steps)
        return tuple(each[first:] for each in rows(epoch))

    def make(described, ranges):
        def fetch_own(*row):
            return fetch(*row, own=ranges.indices(total(*row))), tf.cast(total(*row), tf.int32)

        return described.map(fetch if ranges is None else fetch_own, num_parallel_calls=feed.calls)

    return _registered(make, epochs, rows_from, steps, feed, next_epoch)


def _registered(
    make: Callable, epochs, rows: Callable, steps: int, feed: Feed, next_epoch: Callable[[], int], *, rewrites=False
) -> tf.data.Dataset:
    """The whole batches, registered with a way to make one worker's rows of them.

    Args:
        make: maps a dataset of the rows that describe the batches, and `ranges`, to `(rows, total)`, or to the batches
            if `ranges` is None.
        epochs, rows, steps, feed, next_epoch: as for `by_rows`.
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
