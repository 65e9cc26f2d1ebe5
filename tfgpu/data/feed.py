"""From ordered examples to batches: fetch, batch, change, prefetch."""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.data.examples import Examples, to_model
from tfgpu.errors import InputError, unknown, whole_number

_BATCHES_AHEAD = 4


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
    examples: Examples,
    epochs: tf.data.Dataset,
    order: Callable[[tf.Tensor], tf.Tensor],
    count: int,
    global_batch: int,
    change: Callable,
    feed: Feed,
) -> tf.data.Dataset:
    """Turns one element, the number of an epoch, into that epoch's batches.

    Examples in memory are fetched by rows of indices: batching single examples, or a dataset nested in `flat_map`,
    makes an epoch two to three times as slow (measured; noticeable with steps of 100 us).

    Args:
        examples: what the indices refer to.
        epochs: a dataset of that one element, an int64 scalar.
        order: maps it to the indices of the epoch's examples, int64 [count].
        count: examples in the epoch.
        global_batch: examples in a batch.
        change: `(epoch, places, x, y)` -> the batch. `places` is int64: the position in the epoch of the first example,
            or of each if they may overtake one another.
        feed: how batches are prepared ahead.
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

    # Each component of a dataset's elements costs some microseconds per example, compared with 300 for a small JPEG
    # (measured): epoch, position and index are one tensor.
    def singles(epoch):
        return tf.stack([tf.repeat(epoch, count), tf.range(count, dtype=tf.int64), order(epoch)], axis=1)

    def load(key):
        return key, examples.load(key[2])

    def assemble(key, x):
        places = key[0, 1] if feed.deterministic else key[:, 1]
        return change(key[0, 0], places, to_model(x), tf.gather(labels, key[:, 2]))

    keys = epochs.map(singles).unbatch()
    if examples.ahead is not None:
        keys = _fetched_ahead(keys, examples.ahead, global_batch)
    loaded = keys.map(load, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    if examples.where is None or not feed.deterministic:
        cut = loaded.batch(global_batch)
    else:
        cut = _named(loaded.ignore_errors().batch(global_batch), examples.where, order, count, global_batch)
    assembled = cut.map(assemble, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    # Fused with batching, loading would fix each example's position in advance, so none could overtake another.
    return finish(assembled, steps, feed, rewrites=feed.deterministic)


def _fetched_ahead(keys: tf.data.Dataset, ahead: Callable, global_batch: int) -> tf.data.Dataset:
    """Begins to fetch remote examples some batches before they are read."""

    def begin(key):
        with tf.control_dependencies([ahead(key[:, 2])]):
            return tf.identity(key)

    return keys.batch(global_batch).map(begin).prefetch(_BATCHES_AHEAD).unbatch()


def by_rows(epochs: tf.data.Dataset, rows: Callable, fetch: Callable, steps: int, feed: Feed) -> tf.data.Dataset:
    """Makes an epoch's batches from rows that describe one batch each.

    Args:
        epochs: a dataset of one element, the number of an epoch.
        rows: maps it to tensors of `steps` rows.
        fetch: maps one row of each to the batch.
        steps: the number of batches.
        feed: how batches are prepared ahead.
    """
    made = epochs.map(rows).unbatch().map(fetch, num_parallel_calls=feed.calls, deterministic=feed.deterministic)
    return finish(made, steps, feed)


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
    # Each worker makes the same global batches and keeps its rows: files would be divided unevenly.
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
    """Stops at the first gap in the positions, where a corrupt example was dropped, and names that example.

    A decoder's error names no file. Catching it per example, in a dataset of one, costs ten times as much as decoding a
    JPEG (measured); finding a gap costs nothing.
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
