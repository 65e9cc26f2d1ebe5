"""Decides how several workers read data that Python makes, and says so in the log.

A `PyDataset`'s batches are made by turns, or each worker makes its rows of them; a generator is read by the first
worker alone. Else each worker makes whole batches.
"""

import hashlib
import itertools
import json
import logging
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.compat import coordination, slots, training
from tfgpu.compat.keras import PyDatasetAdapter
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import runtime
from tfgpu.core.dealing import batches, links
from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.generators import SharedGenerator
from tfgpu.core.dealing.links import Links
from tfgpu.core.dealing.py_dataset import OwnRows, Recording, SharedPyDataset, has_rows, names
from tfgpu.core.worker_rows import Ranges, WorkerRows
from tfgpu.core.workers import ledger
from tfgpu.core.workers.messages import Messages
from tfgpu.errors import InputError, unknown

_log = logging.getLogger(__name__)
CHOICES = ("deal", "everywhere")
_WHOLE = "Every worker makes whole batches of %s, and keeps its rows: %s."


@dataclass(frozen=True)
class FromPyDataset:
    """Where a tf.data dataset comes from.

    Attributes:
        adapter: Keras's.
        first: the batches that Keras has read to see what they hold, by number.
    """

    adapter: PyDatasetAdapter
    first: dict[int, object]


@dataclass(frozen=True)
class FromGenerator:
    """A tf.data dataset comes from a generator."""


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
        slots.of(found).made_by = FromPyDataset(self, recording.batches)
        return found

    @wrap("GeneratorDataAdapter.get_tf_dataset")
    def get_dataset_of_generator(stock, self):
        found = stock(self)
        slots.of(found).made_by = FromGenerator()
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


class _Sharing:
    """Shares one dataset.

    Args:
        strategy: of several workers.
        dataset: Keras's, of whole batches.
        source: where it comes from.
        ranges: this worker's rows.
    """

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, source: object, ranges: Ranges):
        self._strategy, self._dataset, self._source = strategy, dataset, source
        devices = len(ranges.shards)
        workers = ranges.count // devices
        self._all = [Ranges(tuple(d * workers + w for d in range(devices)), ranges.count) for w in range(workers)]
        self._rank = self._all.index(ranges)
        self._layout = Layout(dataset.element_spec)
        self._is_generator = isinstance(source, FromGenerator)
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
            why = "their first batches have other shapes"
        if why is not None:
            return self._whole(why)
        found = links.all_workers()
        if isinstance(found, str) and not has_own:
            return self._whole(found)
        if self._is_generator:
            return self._read_by_first(found, number)
        return self._shared(None if isinstance(found, str) else found, number, texts, has_own)

    def _read_by_first(self, found: Links, number: int) -> WorkerRows:
        shared = SharedGenerator(self._dataset, found, number, self._layout, self._all)
        if self._rank == 0:
            _log.info("This worker alone reads the generator, and sends the %d others their rows.", len(self._all) - 1)
        return WorkerRows(lambda given: self._made(shared), lambda: None)

    def _whole(self, why: str) -> None:
        if self._rank == 0:
            _log.info(_WHOLE, self._name, why)

    def _shared(self, found: Links | None, number: int, texts: Messages, has_own: bool) -> WorkerRows:
        shared = self._with_rows(found, number, texts) if has_own else self._sharing(found, number, None)
        slots.of(self._source.adapter).shared = shared
        if self._rank == 0 and has_own:
            _log.info("Each worker makes its rows of each batch of %s, by its method `rows`.", self._name)
        elif self._rank == 0:
            _log.info(
                "The %d workers take turns making the batches of %s, and each sends the others their rows.",
                len(self._all),
                self._name,
            )
        first = self._first if has_own else lambda: self._compare_first(texts)
        return WorkerRows(lambda given: self._made(shared), first)

    def _sharing(self, found: Links | None, number: int, own: OwnRows | None) -> SharedPyDataset:
        return SharedPyDataset(self._source.adapter, found, number, self._layout, self._all, self._rank, own)

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
