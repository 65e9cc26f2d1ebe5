"""Decides how several workers read data that Python makes, and says so in the log.

A `PyDataset`'s batches are made by turns, or each worker makes its rows of them; a generator is read by the first
worker alone. Else each worker makes whole batches.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfgpu.compat import coordination, slots, training
from tfgpu.compat.keras import PyDatasetAdapter
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import runtime
from tfgpu.core.dealing import batches, links
from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.links import Links
from tfgpu.core.dealing.making import described
from tfgpu.core.dealing.py_dataset import OwnRows, Recording, SharedPyDataset, has_rows, names
from tfgpu.core.dealing.streams import Failed, Stream, StreamSpec
from tfgpu.core.worker_rows import Ranges, WorkerRows
from tfgpu.core.workers import ledger
from tfgpu.core.workers.messages import Messages
from tfgpu.errors import InputError, unknown

_log = logging.getLogger(__name__)
CHOICES = ("deal", "everywhere")
_WHOLE = "Every worker makes whole batches of %s, and keeps only its rows: %s."


@dataclass(frozen=True)
class MadeBy:
    """Where a tf.data dataset comes from.

    Attributes:
        adapter: Keras's, of a `PyDataset`; None for a generator.
        first: the batches that Keras has read of it to see what they hold, by number.
    """

    adapter: PyDatasetAdapter | None = None
    first: dict[int, object] = field(default_factory=dict)


def share_python_data() -> None:
    """Keeps with Keras's datasets what they are made from, and makes the workers' copies of a `PyDataset` agree."""

    @wrap("PyDatasetAdapter.get_tf_dataset")
    def get_tf_dataset(stock, self):
        if ledger.current() is None:
            return stock(self)
        dataset = self.py_dataset
        self.py_dataset = recording = Recording(dataset)
        try:
            found = stock(self)
        finally:
            self.py_dataset = dataset
        slots.of(found).made_by = MadeBy(self, recording.batches)
        return found

    @wrap("GeneratorDataAdapter.get_tf_dataset")
    def get_dataset_of_generator(stock, self):
        found = stock(self)
        slots.of(found).made_by = MadeBy()
        return found

    @wrap("PyDatasetAdapter.on_epoch_begin")
    def on_epoch_begin(stock, self):
        if slots.get(self, "shared") is None:
            return stock(self)
        enqueuer, self.enqueuer = self.enqueuer, None  # it starts when it is read, if ever
        try:
            return stock(self)
        finally:
            self.enqueuer = enqueuer

    @wrap("PyDatasetAdapter.on_epoch_end")
    def on_epoch_end(stock, self):
        shared = slots.get(self, "shared")
        if shared is None:
            return stock(self)
        with shared.epoch_end():
            return stock(self)


def choose(strategy: tf.distribute.Strategy, python_data: str) -> tf.distribute.Strategy:
    """Sets whether the workers of a strategy deal each other what Python makes; returns the strategy.

    Args:
        strategy: of several workers.
        python_data: `"deal"` or `"everywhere"`; see `tfgpu.strategy`.

    Raises:
        InputError: another word.
    """
    if python_data not in CHOICES:
        raise unknown("python_data", python_data, CHOICES)
    slots.of(strategy).python_data = python_data
    return strategy


def is_made_by_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is Keras's of what Python makes."""
    return slots.get(dataset, "made_by") is not None


def rows_of(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, ranges: Ranges) -> WorkerRows | None:
    """How to make one worker's rows of data that Python makes; None where each worker makes whole batches.

    Every worker must call it.

    Raises:
        InputError: the workers have other data, or a method `rows` that gives other rows than `__getitem__`.
        MachineError: a worker no longer answers.
    """
    return _Sharing(strategy, dataset, slots.of(dataset).made_by, ranges).rows()


class _Reading:
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
            of_machine = not isinstance(error, tf.errors.InvalidArgumentError)
            raise Failed(batch, described(error.message), of_machine, error.message) from None

    def close(self) -> None:
        """The iterator ends with this object."""


class SharedGenerator:
    """A generator that the first worker reads for all: it need not yield the same on every worker.

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
        source = _Reading(self._dataset) if self._links.rank == 0 else None
        yield from Stream(self._links, key, self._spec, source).read()


class _Sharing:
    """Shares one dataset.

    Args:
        strategy: of several workers.
        dataset: Keras's, of whole batches.
        source: where it comes from.
        ranges: this worker's rows.
    """

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, source: MadeBy, ranges: Ranges):
        self._strategy, self._dataset, self._source = strategy, dataset, source
        devices = len(ranges.shards)
        workers = ranges.count // devices
        self._all = [Ranges(tuple(d * workers + w for d in range(devices)), ranges.count) for w in range(workers)]
        self._rank = self._all.index(ranges)
        self._layout = Layout(dataset.element_spec)
        self._is_generator = source.adapter is None
        self._name = "the generator" if self._is_generator else f"`{type(source.adapter.py_dataset).__name__}`"

    def rows(self) -> WorkerRows | None:
        """How this worker makes its rows, or None."""
        kept = ledger.current()
        if slots.get(self._strategy, "python_data", "deal") == "everywhere":
            return self._whole('as `python_data="everywhere"` says')
        if kept is None or not kept.calls:
            return self._whole("they have no way to agree")
        number = next(vars(slots.of(runtime())).setdefault("shared_data", itertools.count()))
        has_own, facts = False, {}
        if not self._is_generator:
            has_own = has_rows(self._source.adapter.py_dataset)
            facts = {"batches": str(self._source.adapter.num_batches), "rows(index, start, stop)": str(has_own)}
        kept.meet("began to read data", facts)
        if self._rank == 0 and number:
            coordination.delete(f"shared/{number - 1}")  # which all have read
        texts = Messages(f"shared/{number}")
        why = batches.why_not(self._dataset.element_spec)
        told = texts.of_all("spec", json.dumps([why, repr(self._dataset.element_spec)]))
        why = next((reason for reason, _ in map(json.loads, told) if reason), None)
        if why is None and len(set(told)) > 1:
            why = "their first batches have different shapes"
        if why is not None:
            return self._whole(why)
        found = links.all_workers()
        if isinstance(found, str) and not has_own:
            return self._whole(found)
        if self._is_generator:
            shared = SharedGenerator(self._dataset, found, number, self._layout, self._all)
            if self._rank == 0:
                others = len(self._all) - 1
                _log.info("Only this worker reads the generator; it sends the other %d their rows.", others)
            return WorkerRows(lambda given: self._made(shared), lambda: None)
        return self._shared(None if isinstance(found, str) else found, number, texts, has_own)

    def _whole(self, why: str) -> None:
        if self._rank == 0:
            _log.info(_WHOLE, self._name, why)

    def _shared(self, found: Links | None, number: int, texts: Messages, has_own: bool) -> WorkerRows:
        shared = self._with_rows(found, number, texts) if has_own else self._sharing(found, number, None)
        slots.of(self._source.adapter).shared = shared
        if self._rank == 0 and has_own:
            _log.info("Each worker makes only its rows of each batch of %s, with the method `rows`.", self._name)
        elif self._rank == 0:
            text = "The %d workers take turns making the batches of %s, and each sends the others their rows."
            _log.info(text, len(self._all), self._name)
        first = self._first if has_own else lambda: self._compare_first(texts)
        return WorkerRows(lambda given: self._made(shared), first)

    def _sharing(self, found: Links | None, number: int, own: OwnRows | None) -> SharedPyDataset:
        adapter = self._source.adapter
        spec = StreamSpec(type(adapter.py_dataset).__name__, self._layout, self._all, len(self._all))
        return SharedPyDataset(adapter, found, number, spec, own)

    def _with_rows(self, found: Links | None, number: int, texts: Messages) -> SharedPyDataset:
        """Compares what `rows` gives with whole batches. All workers raise what one of them finds."""
        said, shared = "", None
        try:
            own, whole = self._own_rows()
            shared = self._sharing(found, number, own)
            for index in sorted(whole):
                shared.check_rows(index, training.standardized(self._source.adapter, whole[index]))
        except InputError as error:
            said = str(error)
        except Exception as error:  # a user's method may raise anything
            _log.debug("The method `rows` cannot be tried.", exc_info=True)
            said = f"The methods of {self._name} failed: {type(error).__name__}: {error}"
        for rank, text in enumerate(texts.of_all("rows", said)):
            if text:
                raise InputError(f"{text} (Found on {ledger.current().names[rank]}.)")
        return shared

    def _made(self, shared: SharedPyDataset | SharedGenerator) -> tf.data.Dataset:
        signature = self._layout.of_rows, tf.TensorSpec([], tf.int32)
        made = tf.data.Dataset.from_generator(shared.read, output_signature=signature)
        if shared.works_ahead:
            return made.with_options(self._dataset.options())
        return made.prefetch(tf.data.AUTOTUNE)

    def _own_rows(self) -> tuple[OwnRows, dict[int, object]]:
        """What makes own rows, and whole batches to compare it with: the first two and the last."""
        dataset, whole = self._source.adapter.py_dataset, dict(self._source.first)
        count, last = self._source.adapter.num_batches, None
        if count is not None and not hasattr(dataset, "num_rows"):
            if count - 1 not in whole:
                whole[count - 1] = dataset[count - 1]
            last = count - 1, self._rows_in(whole[count - 1])
        return OwnRows(self._all[self._rank], self._rows_in(whole[0]), last), whole

    def _rows_in(self, batch: object) -> int:
        return batches.rows_of(self._arrays(batch))

    def _arrays(self, batch: object) -> list[np.ndarray]:
        return self._layout.arrays(training.standardized(self._source.adapter, batch))

    def _first(self) -> object:
        """The first batch."""
        return self._layout.packed([tf.convert_to_tensor(each) for each in self._arrays(self._source.first[0])])

    def _compare_first(self, texts: Messages) -> None:
        """Compares what the workers have made as the first batch, but for what a worker makes another time differently.

        Raises:
            InputError: it differs.
        """
        marks = [_mark(array) for array in self._arrays(self._source.first[0])]
        told = [json.loads(text) for text in texts.of_all("first", json.dumps(marks))]
        if all(each == told[0] for each in told):
            return
        again = [_mark(array) for array in self._arrays(self._source.adapter.py_dataset[0])]
        fixed = [mark if mark == other else None for mark, other in zip(marks, again, strict=True)]
        told = [json.loads(text) for text in texts.of_all("first again", json.dumps(fixed))]
        for at, name in enumerate(names(self._layout)):
            for rank, each in enumerate(told):
                if each[at] != told[0][at] and None not in (each[at], told[0][at]):
                    kept = ledger.current().names
                    raise InputError(
                        f"`{name}` of batch 0 of {self._name} is not the same on {kept[rank]} as on {kept[0]}, so the "
                        "workers would make batches of different rows. Give every worker the same data in the same "
                        "order: set the same seed, and number labels in an order that does not change "
                        "(`sorted(set(...))`)."
                    )


def _mark(array: np.ndarray) -> str:
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{array.shape} {hashlib.sha256(content).hexdigest()[:16]}"
