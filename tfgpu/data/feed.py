"""From ordered examples to batches: fetch, batch, change, prefetch.

Each dataset is registered with a way to make one worker's rows of its batches alone (`tfgpu.core.worker_rows`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.core import iterator_end, worker_rows
from tfgpu.data.assembly import corrupt, own_rows
from tfgpu.data.assembly.ahead import fetched_ahead
from tfgpu.data.assembly.epoch_spec import EpochSpec
from tfgpu.data.examples import to_model
from tfgpu.data.position import parted
from tfgpu.errors import InputError, unknown, whole_number


@dataclass(frozen=True)
class Feed:
    """How batches are prepared ahead of training. Only `deterministic=False` changes their content.

    Attributes:
        deterministic: False lets an example that is ready overtake a slower one, so the order depends on timing; each
            example is still read once and augmented the same way. TensorFlow keeps the order anyway after
            `tf.config.experimental.enable_op_determinism`, which `tfgpu train --deterministic` calls.
        parallel_calls: how many examples are read and decoded, or batches augmented, in parallel; None: tf.data tunes
            it.
        threads: size of a private thread pool; None: TensorFlow's own.
        prefetch: batches to prefetch; None: tf.data tunes it; 0: none.
        prefetch_to_device: a device, such as `"GPU:0"`, to copy batches to ahead of training; `"auto"`: the first GPU,
            if any. For training without a strategy: a strategy copies to its own devices.
    """

    deterministic: bool = True
    parallel_calls: int | None = None
    threads: int | None = None
    prefetch: int | None = None
    prefetch_to_device: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise InputError(f"`deterministic` must be true or false. Received: {self.deterministic!r}.")
        for name, least in (("parallel_calls", 1), ("threads", 1), ("prefetch", 0)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=least)
        if self.prefetch_to_device is not None and tf.distribute.has_strategy():
            raise InputError(
                f"A strategy copies batches to its own devices. Received: prefetch_to_device="
                f"{self.prefetch_to_device!r} under {type(tf.distribute.get_strategy()).__name__}. Remove it."
            )
        self.device()

    @property
    def calls(self) -> int:
        """The `num_parallel_calls` argument of `map`."""
        return self.parallel_calls or tf.data.AUTOTUNE

    def device(self) -> str | None:
        """Returns the device to copy to, or None; raises `InputError` if it does not exist."""
        wanted = self.prefetch_to_device
        if wanted is None:
            return None
        names = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
        if wanted == "auto":
            return next((name for name in names if name.startswith("GPU:")), None)
        if not isinstance(wanted, str) or wanted.upper().removeprefix("/").removeprefix("DEVICE:") not in names:
            raise unknown("prefetch_to_device", wanted, ["auto", *names])
        return wanted.upper().removeprefix("/").removeprefix("DEVICE:")


def batches(
    spec: EpochSpec, epochs: tf.data.Dataset, feed: Feed, *, next_epoch: Callable[[], int] = lambda: 0
) -> tf.data.Dataset:
    """Turns one element, the number of an epoch, into that epoch's batches.

    Examples in memory are fetched by rows of indices: batching single examples, or a dataset nested in `flat_map`,
    makes an epoch two to three times as slow (measured; noticeable with steps of 100 us).

    Args:
        spec: what the batches are made of. Its `change` gets int64 places: the position in the epoch of the first
            example, or of each if they may overtake one another.
        epochs: a dataset of that one element, an int64 scalar.
        feed: how batches are prepared ahead.
        next_epoch: the number of the epoch that the next iteration reads.
    """

    def rows(position):
        epoch, first = _begun(position, spec.steps)
        _, starts, indices = rows_of(epoch, spec.order(epoch), spec.count, spec.global_batch)
        return tf.repeat(position, spec.steps - first), starts[first:], indices[first:]

    if spec.examples.load is not None:
        made = _loaded(spec, epochs, feed)

        def shard(ranges, rows):
            return own_rows.loaded(spec, rows, feed, ranges)
    else:
        with tf.device("CPU:0"):
            array = tf.constant(spec.examples.array) if spec.examples.stored is None else spec.examples.stored()
        made = by_rows(epochs, rows, own_rows.in_memory(spec, array), spec.steps, feed)

        def shard(ranges, rows):
            return rows.map(own_rows.in_memory(spec, array, ranges), num_parallel_calls=feed.calls)

    return _with_shards(made, shard, epochs, rows, spec.steps, feed, next_epoch)


def _with_shards(made, shard, epochs, rows, steps: int, feed: Feed, next_epoch: Callable[[], int]) -> tf.data.Dataset:
    """Registers how to make one worker's rows of a dataset.

    Args:
        made: the whole batches.
        shard: maps `ranges` and a dataset of the rows that describe the batches to one of `(rows, total)`.
        epochs, rows, steps, feed, next_epoch: as for `by_rows`.
    """
    if not feed.deterministic or feed.prefetch_to_device is not None:
        return made

    def make(ranges):
        rewrites = made.options().experimental_optimization.apply_default_optimizations
        return finish(shard(ranges, epochs.map(rows).unbatch()), steps, feed, rewrites=rewrites)

    def first():
        epoch = tf.data.Dataset.from_tensors(np.int64(next_epoch()))
        whole, _ = next(iter(shard(_WHOLE, epoch.map(rows).unbatch().take(1))))
        return whole

    return worker_rows.register(made, worker_rows.WorkerRows(make, first))


_WHOLE = worker_rows.Ranges((0,), 1)


def _loaded(spec: EpochSpec, epochs: tf.data.Dataset, feed: Feed) -> tf.data.Dataset:
    """Batches of examples that are read on demand."""
    examples, size = spec.examples, spec.global_batch

    # Each component of a dataset's elements costs some microseconds per example, compared with 300 for a small JPEG
    # (measured): epoch, index and position are one tensor.
    def singles(position):
        epoch, first = _begun(position, spec.steps)
        places = tf.range(spec.count, dtype=tf.int64)[first * size :]
        return tf.stack([tf.fill(tf.shape(places), position), spec.order(epoch)[first * size :], places], axis=1)

    def load(key):
        return key, examples.load(key[1])

    def assemble(key, x):
        places = key[0, 2] if feed.deterministic else key[:, 2]
        return spec.change(parted(key[0, 0])[0], places, to_model(x), tf.gather(spec.labels, key[:, 1]))

    def expected(number):
        return number * size + tf.range(spec.total(number * size))

    def index(epoch, place):
        return tf.gather(spec.order(epoch), place)

    keys = epochs.map(singles).unbatch()
    if examples.ahead is not None:
        keys = fetched_ahead(keys.batch(size), examples.ahead, 1).unbatch()
    loaded = keys.map(load, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    if examples.where is None or not feed.deterministic:
        cut = loaded.batch(size)
    else:
        whole = loaded.ignore_errors().batch(size)
        cut = corrupt.named(whole, expected=expected, index=index, where=examples.where)
    assembled = cut.map(assemble, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    # Fused with batching, loading would fix each example's position in advance, so none could overtake another.
    return finish(assembled, spec.steps, feed, rewrites=feed.deterministic)


def by_rows(
    epochs: tf.data.Dataset,
    rows: Callable,
    fetch: Callable,
    steps: int,
    feed: Feed,
    *,
    total: Callable | None = None,
    next_epoch: Callable[[], int] = lambda: 0,
) -> tf.data.Dataset:
    """Makes an epoch's batches from rows that describe one batch each.

    Args:
        epochs: a dataset of one element, the number of an epoch.
        rows: maps it to tensors of `steps` rows.
        fetch: maps one row of each to the batch.
        steps: the number of batches.
        feed: how batches are prepared ahead.
        total: maps one row of each to the number of examples in the batch, if `fetch(..., own=rows)` makes the rows
            `rows` (int64) of the batch alone.
        next_epoch: the number of the epoch that the next iteration reads.
    """

    def rows_from(position):
        epoch, first = _begun(position, steps)
        return tuple(each[first:] for each in rows(epoch))

    described = epochs.map(rows_from).unbatch()
    made = described.map(fetch, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    made = finish(made, steps, feed)

    def shard(ranges, rows):
        def fetch_own(*row):
            return fetch(*row, own=ranges.indices(total(*row))), tf.cast(total(*row), tf.int32)

        return rows.map(fetch_own, num_parallel_calls=feed.calls)

    return made if total is None else _with_shards(made, shard, epochs, rows_from, steps, feed, next_epoch)


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
    options.deterministic = feed.deterministic
    options.experimental_optimization.apply_default_optimizations = rewrites
    # All workers have the same global batches, of which each gets its rows: files would be divided unevenly.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    if feed.threads is not None:
        options.threading.private_threadpool_size = feed.threads
    made = _of_length(made, steps)
    if feed.prefetch != 0:
        made = made.prefetch(feed.prefetch or tf.data.AUTOTUNE)
    made = made.with_options(options)
    device = feed.device()
    if device is None:
        return made
    return made.apply(tf.data.experimental.prefetch_to_device(f"/{device}", feed.prefetch))


def _begun(position: tf.Tensor, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The epoch and the first batch of an iteration, at most the number of batches."""
    epoch, first = parted(position)
    return epoch, tf.minimum(first, steps)


def _of_length(made: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """Says how many elements a dataset has, which may be fewer in an iteration that begins later.

    `assert_cardinality` raises an error for those. The second dataset, which is never read, makes the length of both
    infinite, and so that of `take` known.
    """
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(made.element_spec)):
        return made.apply(tf.data.experimental.assert_cardinality(steps))

    def empty(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([side or 0 for side in spec.shape], spec.dtype)

    never = tf.data.Dataset.from_tensors(0).map(lambda _: tf.nest.map_structure(empty, made.element_spec)).repeat()
    always_first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    chosen = tf.data.Dataset.choose_from_datasets([made, never], always_first, stop_on_empty_dataset=True)
    iterator_end.keep_reach(chosen, made)  # what TensorFlow makes of `always_first` hides that it has no effects
    return chosen.take(steps)
