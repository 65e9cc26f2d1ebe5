"""Where a resumed `fit` goes on: at an epoch and a batch, in data that is read again up to there.

What the resumed run repeats exactly is what the data repeats: datasets in a fixed order; `Dataset.shuffle` with a seed;
shuffled arrays, where `keras.utils.set_random_seed` was called with the same seed. Data that is drawn anew in every
process cannot be taken up where it was left: the run then goes on with as many batches as were missing. With
`steps_per_epoch` one stream feeds all epochs, so all batches that were trained are read again and passed over.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.trainer import Trainer

from tfgpu.compat.patch import wrap
from tfgpu.core import data_order, error_messages, step_blocks
from tfgpu.repairs import trainer


@dataclass(frozen=True)
class Position:
    """Where a backup was made.

    Attributes:
        epoch: the epoch to go on with, from 0.
        done: batches of it that are trained.
        first: the epoch with which the run began, before any interruption.
        logs: what the epoch's steps have logged, where it was interrupted in its validation.
    """

    epoch: int
    done: int
    first: int = 0
    logs: dict | None = None


@dataclass(frozen=True)
class Moments:
    """What a resumed run calls while it passes over what is trained.

    Attributes:
        at_epoch: the data of the epochs before is passed over, none of the position's own epoch.
        at_position: the next batch is the first to train on.
    """

    at_epoch: Callable[[], None] = lambda: None
    at_position: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Source:
    """What is known of the data that the running `fit` trains on.

    Attributes:
        counter: the epochs' counter of a `tfgpu.data` data set, or None.
        is_stream: one stream feeds all epochs.
        may_differ: why it may come in another order in another process, as the end of a sentence; or None.
    """

    counter: object | None
    is_stream: bool
    may_differ: str | None


def pass_over_what_is_trained() -> None:
    """Lets `fit` begin where `take_up` says."""

    @wrap(keras_trainer.TensorFlowTrainer, "fit")
    def fit(stock, self, *args, **kwargs):
        with resumable(self), error_messages.explained(self):
            return stock(self, *args, **kwargs)

    @wrap(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if getattr(self, "_training_data", iterator) is None:  # the first data that `fit` makes is what it trains on
            self._training_data = iterator
        return stock(self, iterator, data_batch)

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        position, run = position_of(self), step_blocks.current()
        has_no_batch_left = not logs and position is not None  # of the interrupted epoch
        if has_no_batch_left and position.logs is not None:
            found = dict(position.logs)
        else:
            found = stock(self, self.get_metrics_result() if has_no_batch_left else logs)
        if run is not None:
            run.logs = found
        return found

    @wrap(keras_trainer.TFEpochIterator, "_enumerate_iterator")
    def enumerate_iterator(stock, self):
        position = take_position(self)
        if position is None:
            yield from stock(self)
            return
        on_the_way, arrived = vars(self).pop("_on_the_way", Moments()), False
        for _ in range(position.first, position.epoch):
            _pass_over_an_epoch(self, lambda: stock(self))
        on_the_way.at_epoch()
        for begin, end, iterator in stock(self):
            trained = min(max(position.done - begin, 0), end - begin + 1)
            draw(iterator, trained)
            if not arrived and position.done <= end + 1:
                on_the_way.at_position()
                arrived = True
            if isinstance(iterator, step_blocks.Block):
                begin, iterator = begin + trained, iterator.after(trained)
                step_blocks.current().block = iterator
            if begin <= end and position.done <= end:
                yield begin, end, iterator


def _pass_over_an_epoch(data, enumerate_epoch) -> None:
    """Does with the data what an epoch does, so that the next one finds its order or its place in the stream."""
    if data.steps_per_epoch:
        with data.catch_stop_iteration():
            for begin, end, iterator in enumerate_epoch():
                draw(iterator, end - begin + 1)
    elif data.num_batches:
        for begin, _, iterator in enumerate_epoch():
            # Making the iterator is enough for a seeded shuffle; a PyDataset is shuffled when it is first read.
            if begin == 0:
                start_shuffle(data, iterator)
    else:
        next(enumerate_epoch())
        data.data_adapter.on_epoch_end()


def start_shuffle(data, iterator) -> None:
    """Reads a batch where nothing else makes the data draw the order of a pass."""
    if isinstance(data.data_adapter, PyDatasetAdapter):
        draw(iterator, 1)


def draw(iterator, count: int) -> None:
    """Takes `count` batches that nobody trains on.

    Raises:
        tf.errors.OutOfRangeError: there were fewer.
    """
    iterator = step_blocks.single_batches(iterator)
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.") from None


def position_of(model) -> Position | None:
    """Where the run goes on that `BackupAndRestore` has just restored, or None in a new one."""
    return getattr(model, "_resumed_at", None)


def take_position(data) -> Position | None:
    """Where to go on in data that a resumed run is about to read; it is told once."""
    return vars(data).pop("_resume_at", None)


def take_up(model, position: Position, on_the_way: Moments | None = None) -> None:
    """Lets the running `fit` go on from a position, with the state that the model was given.

    Args:
        model: in a `fit` that is calling `on_train_begin`.
        position: where to go on.
        on_the_way: what to call meanwhile.
    """
    model._resumed_at, model._initial_epoch = position, position.epoch
    data = getattr(model, "_training_data", None)
    if data is not None:
        trainer.build_now(model, data)  # without a strategy the metrics' variables come with the first step only
        data._resume_at = position
        data._on_the_way = on_the_way or Moments()


def begin_at(model, epoch: int) -> None:
    """Lets the running `fit`, which is calling `on_train_begin`, begin with an epoch; from 0."""
    model._initial_epoch = epoch


def build(model) -> None:
    """Makes all variables that the running `fit` would make with its first step."""
    data = getattr(model, "_training_data", None)
    if data is not None:
        trainer.build_now(model, data)


def source_of(model) -> Source:
    """The running `fit`'s data."""
    data = getattr(model, "_training_data", None)
    if data is None:
        return Source(None, False, None)
    adapter, why = data.data_adapter, None
    found = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
    counter = getattr(found, "tfgpu_epochs", None)
    if isinstance(adapter, GeneratorDataAdapter):
        why = "a generator is read again from its beginning, and must give the same batches in every process"
    elif counter is None and not data_order.is_seeded() and not _is_in_order(adapter):
        why = "no seed is set; call keras.utils.set_random_seed at the script's beginning"
    return Source(counter, bool(data.steps_per_epoch), why)


def _is_in_order(adapter) -> bool:
    return isinstance(adapter, ArrayDataAdapter) and not adapter._shuffle


@contextlib.contextmanager
def resumable(model):
    """A run of `fit` or `Trainer`: within it `BackupAndRestore` finds the data that the run reads."""
    forget_position(model)
    model._training_data = None
    try:
        yield
    finally:
        del model._training_data


def forget_position(model) -> None:
    # Stock Keras lets an `_initial_epoch` that was restored stand, and the next `fit` skips as many epochs.
    model._initial_epoch = model._resumed_at = None
