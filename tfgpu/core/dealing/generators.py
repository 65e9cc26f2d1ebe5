"""A Python generator on several workers: the first one reads it, and sends the others their rows.

So it need not yield the same on every worker: what the first worker's yields is trained on.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.links import Links
from tfgpu.core.dealing.making import described
from tfgpu.core.dealing.streams import Failed, Stream, StreamSpec
from tfgpu.core.worker_rows import Ranges

_OF_INPUT = tf.errors.InvalidArgumentError


class Reading:
    """Reads Keras's own dataset of a generator, as one device does.

    Args:
        dataset: of whole batches.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._iterator, self._count = iter(dataset), itertools.count()

    def __next__(self) -> object:
        batch = next(self._count)
        try:
            return next(self._iterator)
        except tf.errors.OpError as error:
            raise Failed(batch, described(error.message), not isinstance(error, _OF_INPUT), error.message) from None

    def close(self) -> None:
        """The iterator ends with this object."""


class SharedGenerator:
    """A generator that the first worker reads for all.

    Args:
        dataset: Keras's, of whole batches.
        links: to the other workers.
        number: of the data among those that the workers share.
        layout: of its batches.
        ranges: each worker's rows, by rank.
    """

    works_ahead = False

    def __init__(self, dataset: tf.data.Dataset, links: Links, number: int, layout: Layout, ranges: Sequence[Ranges]):
        self._dataset, self._links, self._number = dataset, links, number
        self._spec, self._passes = StreamSpec("generator", layout, ranges, 1), itertools.count()

    def read(self) -> Iterator[tuple[object, np.ndarray]]:
        """One pass: this worker's rows of batch after batch, and each batch's number of rows."""
        key = ("generator", self._number, next(self._passes))
        source = Reading(self._dataset) if self._links.rank == 0 else None
        yield from Stream(self._links, key, self._spec, source).read()
