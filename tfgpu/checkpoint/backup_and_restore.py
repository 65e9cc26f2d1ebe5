"""`BackupAndRestore` that goes on where it stopped: at the batch, in the data, in the draws and in the metrics.

Stock Keras saves the number of the batch and never reads it: the epoch starts again from its first batch with the
weights of its middle (https://github.com/keras-team/keras-hub/issues/204). Here a backup is one file that holds the
weights and, under `tfgpu_position`, where they belong; both change in one rename.

What the data repeats is repeated (see `positions`). The number of replicas may change. A callback's own memory (what
EarlyStopping waits for) begins anew, as in Keras; `tfgpu.callbacks.Checkpoint` keeps it.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict

import h5py
import numpy as np
from keras.src import backend
from keras.src.callbacks.backup_and_restore import BackupAndRestore
from keras.src.utils import file_utils

from tfgpu.checkpoint import callback_hooks, data_position
from tfgpu.compat.patch import wrap
from tfgpu.core import broadcast, replication, training_state
from tfgpu.errors import InputError, MachineError
from tfgpu.repairs import saving

_log = logging.getLogger(__name__)

_NOTE = "tfgpu_position"
_NOTHING, _UNREADABLE = -1, -2


def resume_within_the_epoch() -> None:
    """A resumed `fit` passes over the batches that the backup's weights have learned from."""
    _note_the_position()
    _take_up_the_position()
    data_position.pass_over_what_is_trained()
    callback_hooks.tell_when_all_are_done()


def _note_the_position() -> None:
    @wrap(BackupAndRestore, "on_epoch_begin")
    def on_epoch_begin(stock, self, epoch, logs=None):
        stock(self, epoch, logs)
        position = data_position.position_of(self.model)
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
        position = data_position.Position(self._current_epoch, self._done, self._first_epoch)
        state = {"metrics": self.model.metrics_variables, "draws": list(training_state.draws(self.model).values())}
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
        if data_position.position_of(self.model) is not None:
            raise InputError("Give `fit` either a Checkpoint or a BackupAndRestore: both say where to go on.")
        data_position.forget_position(self.model)
        self._metrics = []
        vars(self).pop("_first_epoch", None)
        with _as_the_chief_has_it(self, lambda: stock(self, logs)):
            note = _read_note(self._weights_path)
        if note is None:  # no backup, or one of stock Keras
            return
        position, state = note
        _assign(list(training_state.draws(self.model).values()), state["draws"])
        self._metrics = state["metrics"]
        _log.info("Resuming epoch %d after %d of its batches.", position.epoch + 1, position.done)
        data_position.take_up(self.model, position)


def _assign(variables: list, values: list[np.ndarray]) -> None:
    if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
        _log.warning("The backup was made with other metrics or random layers: theirs begin anew.")
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _write_note(path, position: data_position.Position, state: dict[str, list[np.ndarray]]) -> None:
    with h5py.File(path, "a") as file:
        group = file.create_group(_NOTE)
        group.attrs["position"] = json.dumps(asdict(position))
        for name, values in state.items():
            part = group.create_group(name)
            for at, value in enumerate(values):
                part[str(at)] = value


def _read_note(path) -> tuple[data_position.Position, dict[str, list[np.ndarray]]] | None:
    if file_utils.is_remote_path(path) or not os.path.exists(path):
        return None
    with h5py.File(path, "r") as file:
        if _NOTE not in file:
            return None
        group = file[_NOTE]
        position = data_position.Position(**json.loads(group.attrs["position"]))
        return position, {name: [part[str(at)][()] for at in range(len(part))] for name, part in group.items()}


@contextlib.contextmanager
def _as_the_chief_has_it(callback: BackupAndRestore, restore):
    """Restores on every worker what the chief has, whatever the others' disks hold: they may not share one.

    Raises:
        MachineError: on the other workers, where the chief could not read its backup.
    """
    strategy = callback.model.distribute_strategy
    if not replication.spans_processes(strategy):
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
    (size,) = broadcast.sum_from_chief(strategy, np.array([size], "int64"))
    if size == _UNREADABLE and not is_chief:
        raise MachineError("The chief worker could not read its backup: see its error. Remove it to begin anew.")
    if size < 0:
        return
    with open(path, "rb" if is_chief else "wb") as file:
        for at in range(0, size, broadcast.CHUNK):
            length = min(broadcast.CHUNK, size - at)
            content = file.read(length) if is_chief else bytes(length)
            words = broadcast.sum_from_chief(strategy, broadcast.as_words(content))
            if not is_chief:
                file.write(broadcast.from_words(words, length))
