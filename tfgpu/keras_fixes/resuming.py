"""`BackupAndRestore` that goes on where it stopped: at the batch, in the data, in the draws and in the metrics.

Stock Keras saves the number of the batch and never reads it: the epoch starts again from its first batch with the
weights of its middle (https://github.com/keras-team/keras-hub/issues/204). Here a backup is one file that holds the
weights and, under `tfgpu_position`, where they belong; both change in one rename.

What the resumed run repeats exactly is what the data repeats: datasets in a fixed order; `Dataset.shuffle` with a seed;
shuffled arrays, where `keras.utils.set_random_seed` was called with the same seed. Data that is drawn anew in every
process cannot be taken up where it was left: the run then goes on with as many batches as were missing. With
`steps_per_epoch` one stream feeds all epochs, so all batches that were trained are read again and passed over.
The number of replicas may change. A callback's own memory (what EarlyStopping waits for) begins anew, as in Keras.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass

import h5py
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.callbacks.backup_and_restore import BackupAndRestore
from keras.src.random import seed_generator
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.trainer import Trainer
from keras.src.utils import file_utils

from tfgpu.errors import MachineError
from tfgpu.keras_fixes import blocks, replica, saving
from tfgpu.keras_fixes.seam import wrap

_log = logging.getLogger(__name__)

_NOTE = "tfgpu_position"
_CHUNK = 1 << 24  # bytes of a backup that travel to the other workers at once
_NOTHING, _UNREADABLE = -1, -2


@dataclass(frozen=True)
class Position:
    """Where a backup was made.

    Attributes:
        epoch: the epoch to go on with, from 0.
        done: batches of it that are trained.
        first: the epoch with which the run began, before any interruption.
    """

    epoch: int
    done: int
    first: int = 0


def resume_within_the_epoch() -> None:
    """A resumed `fit` passes over the batches that the backup's weights have learned from."""
    _note_the_position()
    _take_up_the_position()
    _pass_over_what_is_trained()


def position_of(model) -> Position | None:
    """Where the run goes on that `BackupAndRestore` has just restored, or None in a new one."""
    return getattr(model, "_resumed_at", None)


def take_position(data) -> Position | None:
    """Where to go on in data that a resumed run is about to read; it is told once."""
    return vars(data).pop("_resume_at", None)


@contextlib.contextmanager
def resumable(model):
    """A run of `fit` or `Trainer`: within it `BackupAndRestore` finds the data that the run reads."""
    _forget_position(model)
    model._training_data = None
    try:
        yield
    finally:
        del model._training_data


def _forget_position(model) -> None:
    # Stock Keras lets an `_initial_epoch` that was restored stand, and the next `fit` skips as many epochs.
    model._initial_epoch = model._resumed_at = None


def _note_the_position() -> None:
    @wrap(BackupAndRestore, "on_epoch_begin")
    def on_epoch_begin(stock, self, epoch, logs=None):
        stock(self, epoch, logs)
        position = position_of(self.model)
        is_resumed = position is not None and epoch == position.epoch
        self._current_epoch = epoch  # stock Keras counts from 0 in a resumed run too
        self._done = position.done if is_resumed else 0
        self._last_batch_seen = max(self._done - 1, 0)
        self._first_epoch = position.first if position is not None else getattr(self, "_first_epoch", epoch)
        if self._done:
            _assign(self.model.metrics_variables, self._metrics)

    @wrap(BackupAndRestore, "on_train_batch_end")
    def on_train_batch_end(stock, self, batch, logs=None):
        self._done = batch + 1
        stock(self, batch, logs)

    @wrap(BackupAndRestore, "on_epoch_end")
    def on_epoch_end(stock, self, epoch, logs=None):
        self._done = 0
        stock(self, epoch, logs)

    @wrap(BackupAndRestore, "_save_model")
    def save_model(stock, self):
        if not hasattr(self, "_done") or file_utils.is_remote_path(self.backup_dir):
            return stock(self)
        position = Position(self._current_epoch, self._done, self._first_epoch)
        state = {"metrics": self.model.metrics_variables, "draws": _draws(self.model)}
        values = {name: [backend.convert_to_numpy(v) for v in variables] for name, variables in state.items()}
        if not saving.writes(self.model):
            self.model.save_weights(self._weights_path)  # reads what the chief's reads
            return
        os.makedirs(self.backup_dir, exist_ok=True)
        if self.double_checkpoint and os.path.exists(self._weights_path):
            shutil.copy(self._weights_path, self._prev_weights_path)
            shutil.copy(self._training_metadata_path, self._prev_training_metadata_path)
        with saving.beside(self._weights_path) as path:
            self.model.save_weights(path)
            _write_note(path, position, values)
        with saving.beside(self._training_metadata_path) as path, open(path, "w") as file:  # for stock Keras
            json.dump({"epoch": position.epoch, "batch": max(position.done - 1, 0)}, file)

    @wrap(BackupAndRestore, "on_train_end")
    def on_train_end(stock, self, logs=None):
        if saving.writes(self.model):
            stock(self, logs)


def _take_up_the_position() -> None:
    @wrap(BackupAndRestore, "on_train_begin")
    def on_train_begin(stock, self, logs=None):
        _forget_position(self.model)
        self._metrics = []
        vars(self).pop("_first_epoch", None)
        with _as_the_chief_has_it(self, lambda: stock(self, logs)):
            note = _read_note(self._weights_path)
        if note is None:  # no backup, or one of stock Keras
            return
        position, state = note
        _assign(_draws(self.model), state["draws"])
        self._metrics = state["metrics"]
        self.model._resumed_at, self.model._initial_epoch = position, position.epoch
        _log.info("Resuming epoch %d after %d of its batches.", position.epoch + 1, position.done)
        data = getattr(self.model, "_training_data", None)
        if data is not None:
            _build_metrics(self.model, data)
            data._resume_at = position

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        if not logs and position_of(self) is not None:  # the interrupted epoch had no batch left
            logs = self.get_metrics_result()
        return stock(self, logs)


def _pass_over_what_is_trained() -> None:
    @wrap(keras_trainer.TensorFlowTrainer, "fit")
    def fit(stock, self, *args, **kwargs):
        with resumable(self):
            return stock(self, *args, **kwargs)

    @wrap(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if getattr(self, "_training_data", iterator) is None:  # the first data that `fit` makes is what it trains on
            self._training_data = iterator
        return stock(self, iterator, data_batch)

    @wrap(keras_trainer.TFEpochIterator, "_enumerate_iterator")
    def enumerate_iterator(stock, self):
        position = take_position(self)
        if position is None:
            yield from stock(self)
            return
        for _ in range(position.first, position.epoch):
            _pass_over_an_epoch(self, lambda: stock(self))
        for begin, end, iterator in stock(self):
            trained = min(max(position.done - begin, 0), end - begin + 1)
            draw(iterator, trained)
            if isinstance(iterator, blocks.Block):
                begin, iterator = begin + trained, iterator.after(trained)
                blocks.current().block = iterator
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
    iterator = blocks.single_batches(iterator)
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.") from None


def _draws(model) -> list:
    """The states of the model's random draws, which neither `.keras` nor `.weights.h5` files hold."""
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    states = [v for v in model.variables if id(v) not in known]
    shared = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return states + ([shared.state] if shared is not None else [])


def _build_metrics(model, data) -> None:
    """Makes the variables of the metrics, which without a strategy come with the first step only."""
    if model._compile_metrics is not None and not model._compile_metrics.built:
        model._symbolic_build(data_batch=data._distributed_dataset.element_spec)


def _assign(variables: list, values: list[np.ndarray]) -> None:
    if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
        _log.warning("The backup was made with other metrics or random layers: theirs begin anew.")
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _write_note(path, position: Position, state: dict[str, list[np.ndarray]]) -> None:
    with h5py.File(path, "a") as file:
        group = file.create_group(_NOTE)
        group.attrs["position"] = json.dumps(asdict(position))
        for name, values in state.items():
            part = group.create_group(name)
            for at, value in enumerate(values):
                part[str(at)] = value


def _read_note(path) -> tuple[Position, dict[str, list[np.ndarray]]] | None:
    if file_utils.is_remote_path(path) or not os.path.exists(path):
        return None
    with h5py.File(path, "r") as file:
        if _NOTE not in file:
            return None
        group = file[_NOTE]
        position = Position(**json.loads(group.attrs["position"]))
        return position, {name: [part[str(at)][()] for at in range(len(part))] for name, part in group.items()}


@contextlib.contextmanager
def _as_the_chief_has_it(callback: BackupAndRestore, restore):
    """Restores on every worker what the chief has, whatever the others' disks hold: they may not share one.

    Raises:
        MachineError: on the other workers, where the chief could not read its backup.
    """
    strategy = callback.model.distribute_strategy
    if not replica.spans_processes(strategy):
        restore()
        yield
        return
    files = "_weights_path", "_training_metadata_path"
    if saving.writes(callback.model):
        _choose_readable(callback)
        for name in files:
            path = getattr(callback, name)
            _from_chief(strategy, path if os.path.exists(path) else None)
        restore()  # at the same time as the others: loading a variable that is summed over replicas reads it too
        yield
        return
    theirs = {name: getattr(callback, name) for name in files}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in theirs.items():
            setattr(callback, name, os.path.join(folder, os.path.basename(path)))
            _from_chief(strategy, getattr(callback, name))
        try:
            restore()
            yield
        finally:
            vars(callback).update(theirs)


def _choose_readable(callback: BackupAndRestore) -> None:
    """Puts the backup before in the place of one that cannot be opened, as stock Keras does, or tells all workers."""
    path = callback._weights_path
    if not os.path.exists(path):
        return
    try:
        h5py.File(path, "r").close()
    except OSError:
        if not os.path.exists(callback._prev_weights_path):
            _from_chief(callback.model.distribute_strategy, None, is_readable=False)
            raise
        shutil.copy(callback._prev_weights_path, path)


def _from_chief(strategy, path: str | None, *, is_readable: bool = True) -> None:
    """Copies the chief's file to the others; where the chief has none (None), nor do they."""
    is_chief = strategy.extended.should_checkpoint
    size = _NOTHING if is_readable else _UNREADABLE
    if is_chief and path is not None:
        size = os.path.getsize(path)
    (size,) = _sum_from_chief(strategy, np.array([size], "int64"))
    if size == _UNREADABLE and not is_chief:
        raise MachineError("The chief worker could not read its backup: see its error. Remove it to begin anew.")
    if size < 0:
        return
    with open(path, "rb" if is_chief else "wb") as file:
        for at in range(0, size, _CHUNK):
            length = min(_CHUNK, size - at)
            content = file.read(length) if is_chief else bytes(length)
            words = np.frombuffer(content + bytes(-length % 4), "uint32").astype("int64")
            words = _sum_from_chief(strategy, words)
            if not is_chief:
                file.write(words.astype("uint32").tobytes()[:length])


def _sum_from_chief(strategy, numbers: np.ndarray) -> np.ndarray:
    """The chief's whole numbers, by one sum to which the others add zeros."""
    if not strategy.extended.should_checkpoint:
        numbers = np.zeros_like(numbers)
    return replica.sum_over_workers(strategy, numbers)
