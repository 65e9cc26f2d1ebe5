"""Files of a training: only the chief writes them, and whoever opens one finds the old content or the new one, whole.

On the other workers a save reads what the chief's save reads, in the same order, and keeps nothing: to read a variable
that is summed over replicas is a collective, in which every worker takes part. Nobody waits: a script may also say
`if chief: model.save(path)`, as long as no such variable is in the model. So the file is there when `save` returns on
the chief, and not yet when it returns elsewhere: workers that load it must wait for it by a step of their own.
"""

import contextlib
import io
import os
import tempfile

import h5py
import keras
import tensorflow as tf
from keras.src import backend
from keras.src.callbacks import csv_logger, model_checkpoint, tensorboard
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import file_utils

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def writes(model) -> bool:
    """Whether this process writes the model's files: all do, but the workers of a cluster which are not its chief."""
    strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
    return not step_context.spans_processes(strategy) or strategy.extended.should_checkpoint


@contextlib.contextmanager
def beside(path):
    """Gives a path in the same folder, of the same ending; what is written there takes the place of `path` at the end.

    An error, or the death of the process, leaves what was there before. Folders and remote files are left to Keras.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if file_utils.is_remote_path(path) or os.path.isdir(target) or not os.access(folder, os.W_OK):
        yield path
        return
    aside = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        yield aside
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(aside)


def write_whole_files() -> None:
    """Saves a file beside its place and renames it; stock Keras empties the old file first."""

    @wrap(saving_lib, "save_model")
    def save_model(stock, model, filepath, weights_format="h5", zipped=True):
        if isinstance(filepath, io.IOBase) or not zipped or str(filepath).startswith("hf://"):
            return stock(model, filepath, weights_format, zipped)
        if not str(filepath).endswith(".keras"):
            return stock(model, filepath, weights_format, zipped)
        with beside(str(filepath)) as path:
            return stock(model, path, weights_format, zipped)

    @wrap(saving_lib, "save_weights_only")
    def save_weights(stock, model, filepath, max_shard_size=None, objects_to_skip=None):
        if max_shard_size is not None or not str(filepath).endswith(".weights.h5"):
            return stock(model, filepath, max_shard_size, objects_to_skip)
        with beside(str(filepath)) as path:
            return stock(model, path, max_shard_size, objects_to_skip)

    @wrap(legacy_h5_format, "save_model_to_hdf5")
    def save_hdf5(stock, model, filepath, overwrite=True, include_optimizer=True):
        if isinstance(filepath, h5py.File) or not overwrite:
            return stock(model, filepath, overwrite, include_optimizer)
        with beside(str(filepath)) as path:
            return stock(model, path, overwrite, include_optimizer)


def let_only_the_chief_write() -> None:
    """On workers that are not the chief, saves and the callbacks that write files leave none."""

    @wrap(saving_lib, "save_model")
    def save_model(stock, model, filepath, *args, **kwargs):
        if writes(model):
            return stock(model, filepath, *args, **kwargs)
        saving_lib._serialize_model_as_json(model)  # a model that cannot be saved fails on all workers
        _read(model)

    @wrap(saving_lib, "save_weights_only")
    def save_weights(stock, model, filepath, max_shard_size=None, objects_to_skip=None):
        if writes(model):
            return stock(model, filepath, max_shard_size, objects_to_skip)
        _read(model, objects_to_skip or ())

    @wrap(legacy_h5_format, "save_model_to_hdf5")
    def save_hdf5(stock, model, filepath, overwrite=True, include_optimizer=True):
        if writes(model):
            return stock(model, filepath, overwrite, include_optimizer)
        with h5py.File("nowhere", "w", driver="core", backing_store=False) as file:
            stock(model, file, True, include_optimizer)

    @wrap(keras.Model, "export")
    def export(stock, self, filepath, *args, **kwargs):
        if writes(self):
            return stock(self, filepath, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            stock(self, os.path.join(folder, os.path.basename(os.fspath(filepath))), *args, **kwargs)

    @wrap(model_checkpoint.ModelCheckpoint, "_get_file_path")
    def get_file_path(stock, self, epoch, batch, logs):
        path = stock(self, epoch, batch, logs)
        return path if writes(self.model) else os.path.basename(path)  # the callback makes the path's folder

    for name in ("on_train_begin", "on_epoch_end", "on_train_end"):

        @wrap(csv_logger.CSVLogger, name)
        def write_rows(stock, self, *args, **kwargs):
            if writes(self.model):
                stock(self, *args, **kwargs)

    @wrap(tensorboard.TensorBoard, "set_model")
    def set_model(stock, self, model):
        if writes(model):
            return stock(self, model)
        theirs, self._nowhere = self.log_dir, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log_dir = self._nowhere.name  # Keras takes the writers' folders from it
        try:
            stock(self, model)
        finally:
            self.log_dir = theirs

    @wrap(tensorboard.TensorBoard, "on_train_end")
    def on_train_end(stock, self, logs=None):
        stock(self, logs)
        if not writes(self.model):
            self._nowhere.cleanup()


class _Reader(saving_lib.H5IOStore):
    """A store that takes what a save writes, reads its value, and keeps it no longer than one layer's."""

    def __init__(self):
        super().__init__(io.BytesIO(), mode="w")

    def make(self, path, metadata=None):
        self._h5_entry_group = {}
        return self

    def __setitem__(self, key, value):
        self._h5_entry_group[key] = backend.convert_to_numpy(value)


def _read(model, skipped=()) -> None:
    """Reads a model's state as a save of it does."""
    store = _Reader()
    try:
        saving_lib._save_state(model, store, None, "", {id(saveable) for saveable in skipped})
    finally:
        store.close()
