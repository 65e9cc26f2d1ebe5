"""Data that the workers read themselves, for when reading on the chief or its network limits the speed."""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.errors import InputError, whole_number

Make = Callable[[tf.Tensor, int], tf.data.Dataset]


def on_workers(make: Make, *, batches: int) -> tf.data.Dataset:
    """Makes data for `fit` that the workers read themselves, for when reading on the chief limits the speed.

    Each worker reads its own data over and over. A closure takes the next batches of the worker that runs it, and an
    epoch ends after `batches` of all workers together. So the number of steps in an epoch is exact, but a fast worker
    reads more of its own data than a slow one, and a closure that runs again after a worker died takes other batches. A
    worker that comes back starts its data from the beginning. To see each example once per epoch, give `fit` a plain
    dataset.

    Args:
        make: from a worker's index (int64 scalar tensor) and the number of workers to its dataset of batches, such as
            `lambda index, count: files.shard(count, index)...batch(32)`. Workers must be able to read the files. The
            chief calls it too, with index 0, for the shapes.
        batches: steps in an epoch.

    Returns:
        What to give `fit` as `x`, unchanged. Under other strategies it is the data of one worker of one.

    Raises:
        InputError: `batches` is not a whole number of at least 1, or `make` does not return a dataset.

    Example:
        >>> def make(index, count):
        ...     return tf.data.Dataset.range(100).shard(count, index).batch(10)
        >>> len(list(on_workers(make, batches=4)))
        4
    """
    batches = whole_number("batches", batches)
    found = make(tf.constant(0, tf.int64), 1)
    if not isinstance(found, tf.data.Dataset):
        raise InputError(f"`make` must return a tf.data.Dataset. Received: {type(found).__name__}.")
    return tag(found.repeat().take(batches), make, batches)


class WorkerData:
    """The distributed dataset of such data; each iterator continues where the previous one ended.

    Args:
        make: makes the dataset of batches of worker number `index` of `count`.
        spec: the spec of a batch.
        batches: batches per epoch, of all workers together.
        workers: the number of workers.
    """

    def __init__(self, make: Make, spec, batches: int, workers: int):
        self.element_spec = spec
        self._make, self._batches, self._workers = make, batches, workers
        self._remote = None

    def __iter__(self):
        return WorkerIterator(self, self._batches)

    def on_workers(self, coordinator):
        """The iterators on the workers, created once: an epoch begins where the previous one ended."""
        if self._remote is None:

            def read():
                index = tf.distribute.coordinator.experimental_get_current_worker_index()
                return self._make(index, self._workers).repeat()

            self._remote = iter(coordinator.create_per_worker_dataset(read))
        return self._remote


class WorkerIterator:
    """The batches of one epoch, which the workers hold."""

    def __init__(self, data: WorkerData, left: int):
        self._data, self._left = data, left
        self.on_workers, self.element_spec = data.on_workers, data.element_spec

    def __iter__(self):
        return self

    def __next__(self):
        raise InputError("Only `fit` can use data that workers read. Give `predict` data that the chief reads.")

    def take(self, count: int, is_training: bool) -> range:
        """Takes at most `count` of the batches that are left.

        Raises:
            InputError: they are not for training.
        """
        if not is_training:
            why = "Data that workers read cannot be evaluated: how often each example occurs is not fixed."
            raise InputError(f"{why} Give `validation_data` and `evaluate` data that the chief reads.")
        count = min(count, self._left)
        self._left -= count
        return range(count)


def tag(dataset: tf.data.Dataset, make: Make, batches: int) -> tf.data.Dataset:
    """Makes `fit` read `make` on the workers if it is given `dataset`, the data of one worker of one."""
    slots.of(dataset).on_workers = make, batches
    return dataset


def of(dataset, workers: int) -> WorkerData | None:
    """The worker data of a dataset that `tag` has tagged, kept with it so that all epochs share it; else None."""
    tagged = slots.get(dataset, "on_workers")
    if tagged is None:
        return None
    if slots.get(dataset, "worker_data") is None:
        make, batches = tagged
        slots.of(dataset).worker_data = WorkerData(make, dataset.element_spec, batches, workers)
    return slots.of(dataset).worker_data
