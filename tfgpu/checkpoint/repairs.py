"""`BackupAndRestore` resumes where it stopped: at the batch, with the data position, random draws and metrics.

Stock Keras saves the number of the batch and never reads it: the epoch starts again from its first batch with the
weights of its middle (https://github.com/keras-team/keras-hub/issues/204). Here a backup is one file that holds the
weights and, under `tfgpu_position`, the position; one rename replaces both.

`data_position` says which data repeats its batches. The number of replicas may change. The state of callbacks (the
patience of EarlyStopping) starts fresh, as in Keras; `tfgpu.callbacks.Checkpoint` keeps it.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict

import h5py
import keras
import numpy as np

from tfgpu.checkpoint import callback_hooks, data_position
from tfgpu.compat import callbacks, slots
from tfgpu.compat.keras import file_utils
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, replication
from tfgpu.core.state import broadcast, training_state
from tfgpu.errors import InputError, MachineError
from tfgpu.repairs import Repair, probing, saving

_log = logging.getLogger(__name__)

_NOTE = "tfgpu_position"
_NOTHING, _UNREADABLE = -1, -2


def resumed_epoch_repeats() -> bool:
    """Whether a run that stopped after one of three batches trains on all three again."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise InterruptedError

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=1)
        with contextlib.suppress(InterruptedError):
            model.fit(probing.X, probing.Y, batch_size=1, callbacks=[backup, Stops()], verbose=0)
        model.fit(probing.X, probing.Y, batch_size=1, callbacks=[backup], verbose=0)
    return int(model.optimizer.iterations) != 3


def resume_within_the_epoch() -> None:
    """Makes a resumed `fit` skip the batches that the backup's weights were trained on."""
    _save_position()
    _restore_position()
    data_position.skip_trained_batches()
    extensions.after_callbacks.register(callback_hooks.call)


def _save_position() -> None:
    @wrap("BackupAndRestore.on_epoch_begin")
    def on_epoch_begin(stock, self, epoch, logs=None):
        stock(self, epoch, logs)
        position = data_position.position_of(self.model)
        is_resumed, state = position is not None and epoch == position.epoch, slots.of(self)
        state.done = position.done if is_resumed else 0
        callbacks.set_backup_position(self, epoch, max(state.done - 1, 0))  # stock Keras would count from 0
        state.first_epoch = position.first if position is not None else slots.get(self, "first_epoch", epoch)
        if state.done:
            _assign(self.model.metrics_variables, state.metrics)

    @wrap("BackupAndRestore.on_train_batch_end")
    def on_train_batch_end(stock, self, batch, logs=None):
        slots.of(self).done = batch + 1
        stock(self, batch, logs)

    @wrap("BackupAndRestore.on_epoch_end")
    def on_epoch_end(stock, self, epoch, logs=None):
        slots.of(self).done = 0
        stock(self, epoch, logs)

    @wrap("BackupAndRestore.save_model")
    def save_model(stock, self):
        done, files = slots.get(self, "done"), callbacks.backup_files(self)
        if done is None or file_utils.is_remote_path(self.backup_dir):
            return stock(self)
        position = data_position.DataPosition(callbacks.backup_epoch(self), done, slots.of(self).first_epoch)
        state = {"metrics": self.model.metrics_variables, "draws": list(training_state.draws(self.model).values())}
        values = {name: [keras.ops.convert_to_numpy(v) for v in variables] for name, variables in state.items()}
        if not saving.writes(self.model):
            self.model.save_weights(files.weights)  # takes part in the chief's collectives
            return
        os.makedirs(self.backup_dir, exist_ok=True)
        if self.double_checkpoint and os.path.exists(files.weights):
            shutil.copy(files.weights, files.previous_weights)
            shutil.copy(files.metadata, files.previous_metadata)
        with saving.beside(files.weights) as path:
            self.model.save_weights(path)
            _write_note(path, position, values)
        with saving.beside(files.metadata) as path, open(path, "w") as file:  # for stock Keras
            json.dump({"epoch": position.epoch, "batch": max(position.done - 1, 0)}, file)

    @wrap("BackupAndRestore.on_train_end")
    def on_train_end(stock, self, logs=None):
        if saving.writes(self.model):
            stock(self, logs)


def _restore_position() -> None:
    @wrap("BackupAndRestore.on_train_begin")
    def on_train_begin(stock, self, logs=None):
        if data_position.position_of(self.model) is not None:
            raise InputError("Give `fit` a Checkpoint or a BackupAndRestore, not both: each resumes the training.")
        data_position.forget_position(self.model)
        slots.of(self).metrics = []
        vars(slots.of(self)).pop("first_epoch", None)
        with _with_backup_of_chief(self, lambda: stock(self, logs)):
            note = _read_note(callbacks.backup_files(self).weights)
        if note is None:  # no backup, or one that stock Keras wrote
            return
        position, state = note
        _assign(list(training_state.draws(self.model).values()), state["draws"])
        slots.of(self).metrics = state["metrics"]
        _log.info("Resuming epoch %d after %d of its batches.", position.epoch + 1, position.done)
        data_position.resume_at(self.model, position)


def _assign(variables: list, values: list[np.ndarray]) -> None:
    if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
        _log.warning("The backup was made with other metrics or random layers: their states start fresh.")
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _write_note(path, position: data_position.DataPosition, state: dict[str, list[np.ndarray]]) -> None:
    with h5py.File(path, "a") as file:
        group = file.create_group(_NOTE)
        group.attrs["position"] = json.dumps(asdict(position))
        for name, values in state.items():
            part = group.create_group(name)
            for at, value in enumerate(values):
                part[str(at)] = value


def _read_note(path) -> tuple[data_position.DataPosition, dict[str, list[np.ndarray]]] | None:
    if file_utils.is_remote_path(path) or not os.path.exists(path):
        return None
    with h5py.File(path, "r") as file:
        if _NOTE not in file:
            return None
        group = file[_NOTE]
        position = data_position.DataPosition(**json.loads(group.attrs["position"]))
        return position, {name: [part[str(at)][()] for at in range(len(part))] for name, part in group.items()}


@contextlib.contextmanager
def _with_backup_of_chief(callback: keras.callbacks.BackupAndRestore, restore):
    """Restores the chief's backup on every worker, whatever the others' disks hold.

    Raises:
        MachineError: on the other workers, if the chief could not read its backup.
    """
    strategy = callback.model.distribute_strategy
    if not replication.spans_processes(strategy):
        restore()
        yield
        return
    files = callbacks.backup_files(callback)
    if saving.writes(callback.model):
        _choose_readable(callback)
        for path in (files.weights, files.metadata):
            _copy_from_chief(strategy, path if os.path.exists(path) else None)
        restore()  # together with the others: loading a variable that is summed over replicas is a collective
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        callbacks.read_backup_from(callback, folder)
        copies = callbacks.backup_files(callback)
        for path in (copies.weights, copies.metadata):
            _copy_from_chief(strategy, path)
        try:
            restore()
            yield
        finally:
            callbacks.read_backup_from(callback, os.path.dirname(files.weights))


def _choose_readable(callback: keras.callbacks.BackupAndRestore) -> None:
    """Replaces a backup that cannot be opened with the previous one, as stock Keras does, or tells all workers."""
    path, previous = callbacks.backup_files(callback).weights, callbacks.backup_files(callback).previous_weights
    if not os.path.exists(path):
        return
    try:
        h5py.File(path, "r").close()
    except OSError:
        if not os.path.exists(previous):
            _copy_from_chief(callback.model.distribute_strategy, None, is_readable=False)
            raise
        shutil.copy(previous, path)


def _copy_from_chief(strategy, path: str | None, *, is_readable: bool = True) -> None:
    """Copies the chief's file to the other workers; `path` is None on the chief if it has no file."""
    is_chief = strategy.extended.should_checkpoint
    size = _NOTHING if is_readable else _UNREADABLE
    if is_chief and path is not None:
        size = os.path.getsize(path)
    (size,) = broadcast.sum_from_chief(strategy, np.array([size], "int64"))
    if size == _UNREADABLE and not is_chief:
        raise MachineError("The chief could not read its backup; see its error. To start fresh, remove the backup.")
    if size < 0:
        return
    with open(path, "rb" if is_chief else "wb") as file:
        for at in range(0, size, broadcast.CHUNK):
            length = min(broadcast.CHUNK, size - at)
            content = file.read(length) if is_chief else bytes(length)
            words = broadcast.sum_from_chief(strategy, broadcast.as_words(content))
            if not is_chief:
                file.write(broadcast.from_words(words, length))


REPAIRS = (
    Repair(
        name="resume-within-epoch",
        fault=(
            "BackupAndRestore saves the batch and never reads it: the epoch starts over with weights from its middle"
        ),
        issue="https://github.com/keras-team/keras-hub/issues/204",
        probe=resumed_epoch_repeats,
        apply=resume_within_the_epoch,
    ),
)
