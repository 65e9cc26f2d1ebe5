"""A `keras.utils.PyDataset` on several workers: they take turns making its batches, or each makes its rows of each.

By turns, worker w of N makes the batches w, w + N, ... of the epoch's order, and gives each other worker its rows. A
class with a method `rows(index, start, stop)`, which returns these rows of batch `index` as `__getitem__` returns all,
needs no other worker.
"""

import contextlib
import inspect
import itertools
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tfgpu.compat import training
from tfgpu.compat.keras import PyDatasetAdapter
from tfgpu.core.dealing import batches, epochs
from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.links import Links
from tfgpu.core.dealing.making import Ahead, Chosen, OneByOne
from tfgpu.core.dealing.streams import Failed, Stream, StreamSpec, wait
from tfgpu.core.worker_rows import Ranges
from tfgpu.errors import InputError, MachineError

_PARTS = ("x", "y", "sample_weight")


@dataclass(frozen=True)
class OwnRows:
    """Makes a worker's rows of a batch by the dataset's method `rows`; pickled for processes.

    Attributes:
        ranges: the worker's.
        full: rows of the batches but the last.
        last: number of the last batch and its rows, if it ends.
    """

    ranges: Ranges
    full: int
    last: tuple[int, int] | None

    def total(self, dataset: object, batch: int) -> int:
        """Rows of a whole batch."""
        if hasattr(dataset, "num_rows"):
            return int(dataset.num_rows(batch))
        return self.last[1] if self.last is not None and batch == self.last[0] else self.full

    def __call__(self, dataset: object, batch: int) -> tuple[list, int]:
        """The parts of the worker's rows, and the rows of the whole batch."""
        total = self.total(dataset, batch)
        return [dataset.rows(batch, at, at + held) for at, held in self.ranges.pieces(total)], total


def has_rows(dataset: object) -> bool:
    """Whether a dataset has the method `rows(index, start, stop)`; one of another signature is something else."""
    method = getattr(dataset, "rows", None)
    try:
        return list(inspect.signature(method).parameters) == ["index", "start", "stop"]
    except (TypeError, ValueError):
        return False


class SharedPyDataset:
    """A dataset that this worker shares with the others.

    Args:
        adapter: Keras's, of the dataset.
        links: to the other workers; None if there are none, and each makes its own rows.
        number: of the dataset among those that the workers share.
        spec: of its batches.
        own: makes this worker's rows; None if the workers take turns.
    """

    def __init__(
        self, adapter: PyDatasetAdapter, links: Links | None, number: int, spec: StreamSpec, own: OwnRows | None
    ):
        self.dataset, self.links, self.number, self.own = adapter.py_dataset, links, number, own
        self._adapter, self._spec = adapter, spec
        self._passes, self._epochs, self._read = itertools.count(), itertools.count(), 0
        self._sources: list[OneByOne | Ahead] = []

    @property
    def works_ahead(self) -> bool:
        """Whether Keras's threads or processes make its batches."""
        return self.dataset.workers > 1 or (self.dataset.workers > 0 and self.dataset.use_multiprocessing)

    def read(self) -> Iterator[tuple[object, np.ndarray]]:
        """One pass: this worker's rows of batch after batch, and each batch's number of rows."""
        key = ("batches", self.number, next(self._passes))
        order, base = self._agreed_order(key)
        rows = self._own_rows(order, base) if self.own is not None else self._dealt(key, order, base)
        for self._read, made in enumerate(rows, base + 1):
            yield made

    def _agreed_order(self, key: tuple) -> tuple[list[int] | None, int]:
        """The numbers of the batches of a pass, and where it begins if it does not end: the chief's."""
        count, order, base = self.dataset.num_batches, None, self._read if self.works_ahead else 0
        if count is not None:
            order, base = list(range(count)), 0
            if self._adapter.shuffle:
                random.shuffle(order)  # on each worker, as on one device, although the chief's is taken
        if self.links is None:
            return order, base
        key = ("order", *key[1:])
        if self.links.rank == 0:
            self.links.tell(key, "order", order=order, base=base)
            return order, base
        found = self._heard(key)
        return found["order"], found["base"]

    def _heard(self, key: tuple) -> dict:
        """What the chief tells about something."""
        inbox = self.links.inbox(key)
        wait(self.links, inbox, 0, lambda: (0, 0) in inbox.items, lambda: False)
        header, _ = inbox.items[0, 0]
        self.links.close(key)
        return header

    def _source(self, chosen: Chosen, finish) -> OneByOne | Ahead:
        found = Ahead(chosen, finish, self.dataset) if self.works_ahead else OneByOne(chosen, finish)
        self._sources.append(found)
        return found

    def _dealt(self, key: tuple, order: list[int] | None, base: int) -> Iterator[tuple[object, np.ndarray]]:
        chosen = Chosen(self.dataset, order, base, self.links.rank, self._spec.makers, operator.getitem)
        source = self._source(chosen, lambda batch: training.standardized(self._adapter, batch))
        try:
            yield from Stream(self.links, key, self._spec, source).read()
        finally:
            self._sources.remove(source)

    def _own_rows(self, order: list[int] | None, base: int) -> Iterator[tuple[object, np.ndarray]]:
        source = self._source(Chosen(self.dataset, order, base, 0, 1, self.own), self._joined)
        try:
            yield from source
        except Failed as error:
            kind = MachineError if error.of_machine else InputError
            raise kind(f"`{self._spec.name}.rows({error.batch}, ...)` failed: {error.text}") from None
        finally:
            source.close()
            self._sources.remove(source)

    def _joined(self, made: tuple[list, int]) -> tuple[object, np.ndarray]:
        """The rows of one worker, from those of its devices."""
        parts, total = made
        found = self._joined_parts(parts)
        held = self.own.ranges.rows(total)
        if batches.rows_of(found) != held:
            raise InputError(
                f"`{self._spec.name}.rows` returned {batches.rows_of(found)} rows instead of {held}. All batches "
                "except the last must have as many rows as the first; otherwise, give the class a method "
                "`num_rows(index)`, which says how many rows a batch has."
            )
        return self._spec.layout.packed(found), np.int32(total)

    def _joined_parts(self, parts: list) -> list[np.ndarray]:
        given = [training.standardized(self._adapter, part) for part in parts]
        return [batches.joined(each) for each in zip(*map(self._spec.layout.arrays, given), strict=True)]

    def check_rows(self, index: int, batch: object) -> None:
        """Compares `rows` with a whole batch.

        Args:
            index: number of the batch.
            batch: as `__getitem__` gives it, with `class_weight`'s weights.

        Raises:
            InputError: they differ.
        """
        whole = self._spec.layout.arrays(batch)
        total = batches.rows_of(whole)
        said = self.own.total(self.dataset, index)
        if said != total:
            raise InputError(
                f"Batch {index} of `{self._spec.name}` has {total} rows, not {said}. "
                "Give the class a method `num_rows(index)`, which says how many rows a batch has."
            )
        found = self._joined_parts(self.own(self.dataset, index)[0])
        expected = batches.taken(whole, self.own.ranges, total)
        for name, ours, theirs in zip(names(self._spec.layout), found, expected, strict=True):
            if ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
                is_alike = ours.shape == theirs.shape
                told = "other values" if is_alike else f"shape {ours.shape}, expected {theirs.shape}"
                raise InputError(
                    f"`{self._spec.name}.rows` and `__getitem__` return different rows of batch {index}: the first "
                    f"array that differs is `{name}` ({told}). `rows(index, start, stop)` must return "
                    "exactly these rows of the batch. If `__getitem__` draws random numbers, seed them by the row; or "
                    "remove `rows`: then the workers take turns making whole batches."
                )

    @contextlib.contextmanager
    def epoch_end(self) -> Iterator[None]:
        """Around the dataset's `on_epoch_end`: it draws the same on all workers, and does the same."""
        with contextlib.ExitStack() as stack:
            for source in list(self._sources):
                stack.enter_context(source.paused())
            if self.links is None:
                yield
                return
            number = next(self._epochs)
            key = ("states", self.number, number)
            if self.links.rank == 0:
                self.links.tell(key, "states", states=epochs.states(self.dataset))
            else:
                epochs.take_over(self.dataset, self._heard(key)["states"])
            before = epochs.marks(self.dataset)
            yield
            changed = epochs.changed(before, epochs.marks(self.dataset))
            key = ("changed", self.number, number)
            if self.links.rank == 0:
                self.links.tell(key, "changed", changed=changed)
            else:
                chief = self._heard(key)["changed"]
                epochs.check(self._spec.name, chief, changed, self.links.ledger.name)


def names(layout: Layout) -> list[str]:
    """The names of a batch's arrays, such as `x` or `x['pixels']`."""
    batch = layout.spec if isinstance(layout.spec, tuple) else (layout.spec,)
    pairs = [(part, path) for part, each in zip(_PARTS, batch, strict=False) for path in _paths(each)]
    return [part + "".join(f"[{key!r}]" for key in path) for part, path in pairs]


def _paths(structure: object, path: tuple = ()) -> Iterator[tuple]:
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from _paths(structure[key], (*path, key))
    elif isinstance(structure, tuple):
        for key, each in enumerate(structure):
            yield from _paths(each, (*path, key))
    else:
        yield path


class Recording:
    """Stands in for a dataset while Keras reads its first batches to see what they hold, and keeps them."""

    def __init__(self, dataset: object):
        self._dataset, self.batches = dataset, {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> object:
        self.batches[index] = self._dataset[index]
        return self.batches[index]
