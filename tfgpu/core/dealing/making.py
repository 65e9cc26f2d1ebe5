"""Makes chosen batches of a `PyDataset`, one by one or ahead by Keras's threads or processes."""

import contextlib
import dataclasses
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from tfgpu.compat.keras import OrderedEnqueuer
from tfgpu.core.dealing.streams import Closed, Failed

_OF_MACHINE = OSError, MemoryError
_MOST_SAID = 200
END = "end"


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some batches of a `PyDataset`, numbered from 0. Processes get a copy.

    Each is a tuple of one batch, or the error that came of it; after the last one, `END`.

    Attributes:
        dataset: the `PyDataset`.
        order: the numbers of the dataset's batches, in the order of the epoch; None if they do not end.
        base: without an order, the number of the first batch.
        first, step: of the order, which batches are made.
        make: of the dataset and the number of a batch, what is made of it.
        num_batches: unknown: what asks for batches stops by itself, and goes on where it stopped.
    """

    dataset: object
    order: Sequence[int] | None
    base: int
    first: int
    step: int
    make: Callable[[object, int], object]
    num_batches: ClassVar[None] = None

    def __getitem__(self, number: int) -> object:
        at = self.first + number * self.step
        if self.order is not None and at >= len(self.order):
            return END
        batch = self.base + at if self.order is None else self.order[at]
        try:
            return (self.make(self.dataset, batch),)
        except Exception as error:  # a user's class may raise anything
            text = described(f"{type(error).__name__}: {error}")
            return Failed(batch, text, isinstance(error, _OF_MACHINE), traceback.format_exc())


def described(error: str) -> str:
    """The first line of an error, not too long."""
    return (error.strip().splitlines() or [""])[0][:_MOST_SAID].removesuffix(": ").rstrip()


def _checked(found: object) -> object:
    """A batch that `Chosen` has made.

    Raises:
        Failed: it has not.
        StopIteration: there is no other.
    """
    if isinstance(found, Failed):
        raise found
    if found == END:
        raise StopIteration
    return found[0]


class OneByOne:
    """Makes each batch when it is asked for."""

    def __init__(self, chosen: Chosen, finish: Callable[[object], object]):
        self._batches = map(chosen.__getitem__, itertools.count())
        self._finish = finish

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        return self._finish(_checked(next(self._batches)))

    def close(self) -> None:
        """Nothing is made ahead."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing to pause: `Dataset.prefetch` reads on meanwhile on one device, too."""
        yield


class Ahead:
    """Makes batches ahead, by a dataset's own `workers`, `use_multiprocessing` and `max_queue_size`."""

    def __init__(self, chosen: Chosen, finish: Callable[[object], object], dataset: object):
        how = dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size
        self._enqueuer, self._finish = OrderedEnqueuer(chosen, *how), finish
        self._changed, self._is_paused, self._is_closed, self._is_reading = threading.Condition(), False, False, False
        self._enqueuer.start()
        self._batches = self._enqueuer.get()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused or self._is_closed)
            if self._is_closed:
                raise Closed
            self._is_reading = True
        try:
            found = next(self._batches)
        finally:
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()
        return self._finish(_checked(found))

    def close(self) -> None:
        """Ends the threads or processes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_reading)
        self._enqueuer.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is made, and then by new threads or processes, which have the dataset as it is."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: not self._is_reading)
        self._enqueuer.stop()
        try:
            yield
        finally:
            with self._changed:
                if not self._is_closed:
                    self._enqueuer.start()
                    self._batches = self._enqueuer.get()
                self._is_paused = False
                self._changed.notify_all()
