"""The data position: the epoch and batch at which a resumed `fit` continues. It skips the batches up to there.

A `tfgpu.data` dataset that is read by place starts there, without reading the earlier batches.

The resumed run sees the same batches if the data repeats them: datasets in a fixed order, `Dataset.shuffle` with a
seed, and shuffled arrays after `keras.utils.set_random_seed` with the same seed. Data that every process
draws again cannot be resumed: the run then trains on as many batches as were missing. With `steps_per_epoch` one stream
feeds all epochs, so a resumed run reads and skips all batches that were trained on.
"""

import contextlib
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots, training
from tfgpu.compat.keras import ArrayDataAdapter, GeneratorDataAdapter, PyDatasetAdapter, TFDatasetAdapter
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, step_blocks
from tfgpu.core.randomness import data_order
from tfgpu.core.state import training_state
from tfgpu.repairs import trainer


@dataclass(frozen=True)
class DataPosition:
    """Where a resumed `fit` continues.

    Attributes:
        epoch: the epoch to continue, from 0.
        done: batches of that epoch that were trained on.
        first: the epoch with which the run began, before any interruption.
        logs: the training logs of the epoch if it was interrupted in its validation.
    """

    epoch: int
    done: int
    first: int = 0
    logs: dict | None = None


@dataclass(frozen=True)
class DataSource:
    """What is known about the data that the running `fit` trains on.

    Attributes:
        counter: the epoch counter of a `tfgpu.data` dataset, or None.
        is_stream: whether one stream feeds all epochs.
        may_differ: why another process may read it in another order, as the end of a sentence; or None.
    """

    counter: object | None
    is_stream: bool
    may_differ: str | None


def skip_trained_batches() -> None:
    """Makes `fit` begin where `resume_at` says."""

    extensions.method_calls.register(resumable, order=-1)

    @wrap("TensorFlowTrainer.maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if slots.get(self, "training_data", iterator) is None:  # `fit` makes the iterator of its training data first
            slots.of(self).training_data = iterator
        return stock(self, iterator, data_batch)

    @wrap("Trainer.get_metrics_result_or_logs")
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

    @wrap("TFEpochIterator.enumerate_iterator")
    def enumerate_iterator(stock, self):
        position = vars(slots.of(self)).pop("resume_at", None)  # once
        if position is None:
            yield from stock(self)
            return
        random, arrived = vars(slots.of(self)).pop("random_states", None), False
        for _ in range(position.first, position.epoch):
            _skip_epoch(self, lambda: stock(self))
        if random:
            training_state.restore_random_states(random[0])
        is_there = _begin_there(self, position.done)
        for begin, end, iterator in stock(self):
            trained = min(max(position.done - begin, 0), end - begin + 1)
            if not is_there:
                skip_batches(iterator, trained)
            if not arrived and position.done <= end + 1:
                if random:
                    training_state.restore_random_states(random[1])
                arrived = True
            if isinstance(iterator, step_blocks.Block):
                begin, iterator = begin + trained, iterator.skip(trained)
                step_blocks.current().block = iterator
            if begin <= end and position.done <= end:
                yield begin, end, iterator


def _begin_there(data, done: int) -> bool:
    """Makes the next iteration begin with a batch, if the data is read by place; else returns False."""
    adapter = data.data_adapter
    found = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
    if data.steps_per_epoch or not done or not slots.get(found, "begins_anywhere"):
        return False
    slots.get(found, "epochs").step = done
    return True


def _skip_epoch(data, enumerate_epoch) -> None:
    """Reads what an epoch reads, so that the next one gets its own order, or its place in the stream."""
    if data.steps_per_epoch:
        with data.catch_stop_iteration():
            for begin, end, iterator in enumerate_epoch():
                skip_batches(iterator, end - begin + 1)
    elif data.num_batches:
        for begin, _, iterator in enumerate_epoch():
            # Creating the iterator is enough for a seeded shuffle; a PyDataset is shuffled when it is first read.
            if begin == 0 and isinstance(data.data_adapter, PyDatasetAdapter):
                skip_batches(iterator, 1)
    else:
        next(enumerate_epoch())
        data.data_adapter.on_epoch_end()


def skip_batches(iterator, count: int) -> None:
    """Reads `count` batches without training on them.

    Raises:
        tf.errors.OutOfRangeError: the data has fewer.
    """
    iterator = step_blocks.single_batches(iterator)
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.") from None


def position_of(model) -> DataPosition | None:
    """The position at which the running `fit` was resumed; None if it was not."""
    return slots.get(model, "resumed_at")


def resume_at(model, position: DataPosition, random_states: tuple | None = None) -> None:
    """Makes the running `fit` continue from a position; the caller has restored the model's state.

    Args:
        model: in a `fit` that is calling `on_train_begin`.
        position: where to continue.
        random_states: to restore once the epochs before the position's are skipped, and before the first batch to
            train on.
    """
    slots.of(model).resumed_at = position
    begin_at(model, position.epoch)
    data = slots.get(model, "training_data")
    if data is not None:
        trainer.build_now(model, data)  # without a strategy, only the first step creates the metrics' variables
        slots.of(data).resume_at = position
        slots.of(data).random_states = random_states


def begin_at(model, epoch: int | None) -> None:
    """Makes the running `fit`, which is calling `on_train_begin`, begin with an epoch, from 0."""
    training.resume_from(model, epoch)


def build(model) -> None:
    """Creates all variables that the running `fit` would create in its first step."""
    data = slots.get(model, "training_data")
    if data is not None:
        trainer.build_now(model, data)


def source_of(model) -> DataSource:
    """What is known about the data of the running `fit`."""
    data = slots.get(model, "training_data")
    if data is None:
        return DataSource(None, False, None)
    adapter, why = data.data_adapter, None
    found = adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None
    counter = slots.get(found, "epochs")
    if isinstance(adapter, GeneratorDataAdapter):
        why = "a generator starts from its beginning, and must yield the same batches in every process"
    elif counter is None and not data_order.is_seeded() and not _is_in_order(adapter):
        why = "no seed is set; call keras.utils.set_random_seed at the beginning of the script"
    return DataSource(counter, bool(data.steps_per_epoch), why)


def _is_in_order(adapter) -> bool:
    return isinstance(adapter, ArrayDataAdapter) and not training.shuffles(adapter)


@contextlib.contextmanager
def resumable(model, name: str, arguments: dict):
    """Around a `fit`: inside, `source_of` and `resume_at` find the data that it trains on."""
    if name != "fit":
        yield
        return
    forget_position(model)
    slots.of(model).training_data = None
    try:
        yield
    finally:
        del slots.of(model).training_data


def forget_position(model) -> None:
    """Forgets where an earlier `fit` was resumed: stock Keras keeps the epoch, and the next `fit` skips that many."""
    slots.of(model).resumed_at = None
    begin_at(model, None)
