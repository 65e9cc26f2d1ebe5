"""From examples in an order to batches: fetch, batch, change, prefetch, each ahead of the training."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.data.examples import Examples, to_model
from tfgpu.errors import InputError, unknown


@dataclass(frozen=True)
class Feed:
    """How batches are made ahead of the training. Only `deterministic=False` changes what is in them.

    Attributes:
        deterministic: False lets an example that is ready overtake one that is not, so that the order depends
            on the timing; each example is still read once and augmented as it would be. TensorFlow keeps the order
            all the same where `tf.config.experimental.enable_op_determinism` was called, as `tfgpu train` does.
        parallel_calls: how many examples are read and decoded, or batches augmented, at once; None: tf.data
            finds the number while it runs.
        threads: threads of this data's own; None: those that TensorFlow has.
        prefetch: batches that are made ahead; None: tf.data finds the number; 0: none.
        prefetch_to_device: a device's name, such as `"GPU:0"`, that batches are copied to ahead of the training;
            `"auto"`: the first GPU, and nothing without one. For training without a strategy: a strategy
            copies to its own devices.
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
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise InputError(
                    f"`{name}` must be a whole number from {least}. Received: {value!r}. "
                    "Leave it out to have it found while the data is read."
                )
        if self.prefetch_to_device is not None and tf.distribute.has_strategy():
            raise InputError(
                f"A strategy copies batches to its own devices ahead. Received: prefetch_to_device="
                f"{self.prefetch_to_device!r} under {type(tf.distribute.get_strategy()).__name__}. Leave it out."
            )
        self.device()

    @property
    def calls(self) -> int:
        """What `map` takes as `num_parallel_calls`."""
        return self.parallel_calls or tf.data.AUTOTUNE

    def device(self) -> str | None:
        """Names the device to copy to, or None; raises `InputError` where there is no such device."""
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
    examples: Examples,
    epochs: tf.data.Dataset,
    order: Callable[[tf.Tensor], tf.Tensor],
    count: int,
    global_batch: int,
    change: Callable,
    feed: Feed,
) -> tf.data.Dataset:
    """Turns one element, the number of an epoch, into that epoch's batches.

    Args:
        examples: what the indices stand for.
        epochs: a data set of that one element, an int64 scalar.
        order: from it to the indices of the epoch's examples, int64 [count].
        count: examples in the epoch.
        global_batch: examples in a batch.
        change: `(epoch, places, x, y)` -> the batch. `places` is int64: the place in the epoch of the first
            example, or of each where they may overtake one another.
        feed: how far ahead, and how many at once.

    Examples in memory are fetched by rows of indices: cutting a batch out of single examples, or a dataset
    nested in `flat_map`, costs two to three times as much an epoch (measured; it shows beside a step of 100
    us).
    """
    with tf.device("CPU:0"):
        labels = tf.constant(examples.labels)
    steps = -(-count // global_batch)
    if examples.load is None:
        with tf.device("CPU:0"):
            array = tf.constant(examples.array) if examples.stored is None else examples.stored()

        def fetch(epoch, start, row):
            index = row[: count - start]  # the last row may be padded
            x = tf.ensure_shape(to_model(tf.gather(array, index)), [None, *array.shape[1:]])
            return change(epoch, start, x, tf.gather(labels, index))

        return by_rows(epochs, lambda epoch: rows_of(epoch, order(epoch), count, global_batch), fetch, steps, feed)

    # Each component of a data set's elements costs some microseconds an example, beside 300 for a small JPEG
    # (measured): epoch, place and index go as one.
    def singles(epoch):
        return tf.stack([tf.repeat(epoch, count), tf.range(count, dtype=tf.int64), order(epoch)], axis=1)

    def load(key):
        return key, examples.load(key[2])

    def assemble(key, x):
        places = key[0, 1] if feed.deterministic else key[:, 1]
        return change(key[0, 0], places, to_model(x), tf.gather(labels, key[:, 2]))

    loaded = epochs.map(singles).unbatch().map(load, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    if examples.where is None or not feed.deterministic:
        cut = loaded.batch(global_batch)
    else:
        cut = _named(loaded.ignore_errors().batch(global_batch), examples.where, order, count, global_batch)
    assembled = cut.map(assemble, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    # Joined with batching, loading gives each example its place beforehand: none could overtake another.
    return finish(assembled, steps, feed, rewrites=feed.deterministic)


def by_rows(epochs: tf.data.Dataset, rows: Callable, fetch: Callable, steps: int, feed: Feed) -> tf.data.Dataset:
    """Makes an epoch's batches from rows that say what is in each.

    Args:
        epochs: a data set of one element, the number of an epoch.
        rows: from it to tensors of `steps` rows.
        fetch: from one row of each to the batch.
        steps: how many.
        feed: how far ahead, and how many at once.
    """
    made = epochs.map(rows).unbatch().map(fetch, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    return finish(made, steps, feed)


def rows_of(epoch, indices, count: int, global_batch: int):
    """Cuts an epoch's indices into rows of a batch each, the last one padded: epochs, first places, indices."""
    steps = -(-count // global_batch)
    padded = tf.pad(indices, [[0, steps * global_batch - count]])
    starts = tf.range(0, count, global_batch, dtype=tf.int64)
    return tf.repeat(epoch, steps), starts, tf.reshape(padded, [steps, global_batch])


def finish(made: tf.data.Dataset, steps: int, feed: Feed, *, rewrites: bool = False) -> tf.data.Dataset:
    """Says how many batches there are and how they are made ahead; the end of every pipeline.

    Args:
        made: the batches.
        steps: how many.
        feed: how they are made ahead.
        rewrites: let tf.data rewrite its graph. It joins loading and batching, which saves a copy of each example;
            but it makes the start of an iteration a quarter slower (measured), which shows where epochs are short.
    """
    options = tf.data.Options()
    options.deterministic = feed.deterministic
    options.experimental_optimization.apply_default_optimizations = rewrites
    # Each worker makes the same global batches and keeps its part: files would be cut unevenly.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    if feed.threads is not None:
        options.threading.private_threadpool_size = feed.threads
    made = made.apply(tf.data.experimental.assert_cardinality(steps))
    if feed.prefetch != 0:
        made = made.prefetch(feed.prefetch or tf.data.AUTOTUNE)
    made = made.with_options(options)
    device = feed.device()
    if device is None:
        return made
    return made.apply(tf.data.experimental.prefetch_to_device(f"/{device}", feed.prefetch))


def _named(cut: tf.data.Dataset, where: Callable, order: Callable, count: int, global_batch: int) -> tf.data.Dataset:
    """Stops at the first gap in the places, where a corrupt example has dropped out, with that example's name.

    A decoder's error names no file. To catch it for each example, in a data set of one, costs ten times the
    decoding of a JPEG (measured); a gap is found for nothing.
    """

    def look(number, batch):
        key, x = batch
        places = key[:, 1]
        expected = tf.range(number * global_batch, tf.minimum((number + 1) * global_batch, count))
        got = tf.pad(places, [[0, tf.size(expected) - tf.size(places)]], constant_values=-1)
        missing = expected[tf.argmax(got != expected)]
        whole = tf.reduce_all(got == expected)

        def stop():
            name = where(tf.gather(order(key[0, 0]), missing))
            with tf.control_dependencies([tf.debugging.Assert(whole, ["Corrupt:", name])]):
                return tf.identity(key)

        return tf.cond(whole, lambda: key, stop), x

    return cut.enumerate().map(look)
