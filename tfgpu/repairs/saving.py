"""Files of a training: only the chief writes them, and a reader finds either the old or the new content, complete.

On the other workers, a save reads what the chief's save reads, in the same order, and discards it: reading a variable
that is summed over replicas is a collective, in which every worker takes part. Nobody waits, so a script may also run
`if chief: model.save(path)`, unless the model has such a variable. The file exists when `save` returns on the chief,
but perhaps not yet when it returns elsewhere: workers that load it must wait for it themselves.
"""

import contextlib
import inspect
import io
import os
import pathlib
import tempfile

import h5py
import keras
import tensorflow as tf

from tfgpu import atomic
from tfgpu.compat import distribute, saving, slots
from tfgpu.compat.keras import file_utils
from tfgpu.compat.patch import wrap
from tfgpu.core import replication
from tfgpu.core.state import slice_writer
from tfgpu.repairs import Repair, probes


def writes(model) -> bool:
    """Whether this process writes the model's files; in a cluster, only the chief does."""
    strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
    return not replication.spans_processes(strategy) or strategy.extended.should_checkpoint


@contextlib.contextmanager
def beside(path):
    """Yields a path in the same folder with the same suffix; at the end, the file there replaces `path`.

    After an error or the death of the process, the old file remains. Folders and remote files are left to Keras.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if file_utils.is_remote_path(path) or os.path.isdir(target) or not os.access(folder, os.W_OK):
        yield path
        return
    with atomic.replacing(target, suffix="".join(pathlib.Path(name).suffixes[-2:])) as aside:  # such as .weights.h5
        yield str(aside)


def write_whole_files() -> None:
    """Saves to a temporary file and renames it; stock Keras empties the old file first."""

    @wrap("saving_lib.save_model")
    def save_model(stock, model, filepath, *args, **kwargs):  # what follows differs between versions
        bound = inspect.signature(stock).bind(model, filepath, *args, **kwargs)
        bound.apply_defaults()
        is_file = isinstance(filepath, io.IOBase) or not bound.arguments.get("zipped", True)
        if is_file or str(filepath).startswith("hf://") or not str(filepath).endswith(".keras"):
            return stock(model, filepath, *args, **kwargs)
        with beside(str(filepath)) as path:
            is_aside = path != str(filepath)
            if is_aside and model.built and bound.arguments.get("weights_format", "h5") == "h5":
                return saving.write_model(model, path, slice_writer.write)
            return stock(model, path, *args, **kwargs)

    @wrap("BaseOptimizer.save_own_variables")
    def save_optimizer(stock, self, store):
        if not saving.is_streamed(store):
            return stock(self, store)
        for at, variable in enumerate(self.variables):  # Keras makes an array of each
            store[str(at)] = variable

    @wrap("saving_lib.save_weights_only")
    def save_weights(stock, model, filepath, max_shard_size=None, objects_to_skip=None):
        if max_shard_size is not None or not str(filepath).endswith(".weights.h5"):
            return stock(model, filepath, max_shard_size, objects_to_skip)
        with beside(str(filepath)) as path:
            return stock(model, path, max_shard_size, objects_to_skip)

    @wrap("hdf5_format.save_model_to_hdf5")
    def save_hdf5(stock, model, filepath, overwrite=True, include_optimizer=True):
        if isinstance(filepath, h5py.File) or not overwrite:
            return stock(model, filepath, overwrite, include_optimizer)
        with beside(str(filepath)) as path:
            return stock(model, path, overwrite, include_optimizer)


def write_on_chief_only() -> None:
    """Makes saves and callbacks write no files on workers other than the chief."""
    _save_on_chief_only()
    _log_on_chief_only()


def _save_on_chief_only() -> None:
    @wrap("saving_lib.save_model")
    def save_model(stock, model, filepath, *args, **kwargs):
        if writes(model):
            return stock(model, filepath, *args, **kwargs)
        saving.check_serializable(model)  # raises on every worker what the save would raise on the chief
        saving.read_all(model)

    @wrap("saving_lib.save_weights_only")
    def save_weights(stock, model, filepath, max_shard_size=None, objects_to_skip=None):
        if writes(model):
            return stock(model, filepath, max_shard_size, objects_to_skip)
        saving.read_all(model, objects_to_skip or ())

    @wrap("hdf5_format.save_model_to_hdf5")
    def save_hdf5(stock, model, filepath, overwrite=True, include_optimizer=True):
        if writes(model):
            return stock(model, filepath, overwrite, include_optimizer)
        with h5py.File("nowhere", "w", driver="core", backing_store=False) as file:
            stock(model, file, True, include_optimizer)

    @wrap("keras.Model.export")
    def export(stock, self, filepath, *args, **kwargs):
        if writes(self):
            return stock(self, filepath, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            stock(self, os.path.join(folder, os.path.basename(os.fspath(filepath))), *args, **kwargs)


def _log_on_chief_only() -> None:
    @wrap("ModelCheckpoint.get_file_path")
    def get_file_path(stock, self, epoch, batch, logs):
        path = stock(self, epoch, batch, logs)
        return path if writes(self.model) else os.path.basename(path)  # the callback makes the path's folder

    for name in ("on_train_begin", "on_epoch_end", "on_train_end"):

        @wrap(f"CSVLogger.{name}")
        def write_rows(stock, self, *args, **kwargs):
            if writes(self.model):
                stock(self, *args, **kwargs)

    @wrap("TensorBoard.set_model")
    def set_model(stock, self, model):
        if writes(model):
            return stock(self, model)
        theirs, nowhere = self.log_dir, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        slots.of(self).nowhere, self.log_dir = nowhere, nowhere.name  # Keras derives the writers' folders from it
        try:
            stock(self, model)
        finally:
            self.log_dir = theirs

    @wrap("TensorBoard.on_train_end")
    def on_train_end(stock, self, logs=None):
        stock(self, logs)
        if not writes(self.model):
            slots.of(self).nowhere.cleanup()


@probes("a save empties the old file first: if it is interrupted, both are lost")
def failed_save_destroys() -> bool:
    """Whether a save that fails halfway destroys the existing file."""

    class Fails(keras.layers.Layer):
        def save_own_variables(self, store):
            raise InterruptedError

    model = keras.Sequential([keras.Input((2,)), Fails()])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m.keras")
        path.write_text("before")
        try:
            model.save(path)
        except InterruptedError:
            pass
        return path.read_bytes() != b"before"


@probes("every worker writes the same files")
def every_worker_writes() -> bool:
    """Whether a worker that is not the chief writes a file."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    distribute.act_as_non_chief(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/w.weights.h5")
        return bool(os.listdir(folder))


REPAIRS = (
    Repair("whole-files", failed_save_destroys, write_whole_files),
    Repair(
        "chief-writes",
        every_worker_writes,
        write_on_chief_only,
        issue="https://github.com/tensorflow/tensorflow/issues/38635",
    ),
)
