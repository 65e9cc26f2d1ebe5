"""One worker reads a checkpoint, and all get it: their disks may hold others, or none."""

from pathlib import Path

import keras
import tensorflow as tf

from tfgpu.checkpoint import data_position, storage, training_state
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.storage import Damaged, Snapshot
from tfgpu.core import broadcast, replication
from tfgpu.errors import InputError, MachineError

_NOTHING, _FOUND, _FAILED = 0, 1, 2


def fetch(
    strategy: tf.distribute.Strategy, directory: Path, *, best: Best | None = None, prepare: bool = False
) -> Snapshot | None:
    """The newest whole checkpoint of the chief, or of the only process. On several workers, each must call it.

    Args:
        strategy: of the model that gets it.
        directory: where the checkpoints are.
        best: take the best epoch's in place of the newest.
        prepare: remove what a killed process left, and find out whether checkpoints can be written.

    Raises:
        InputError: all are damaged.
        MachineError: none can be written; or, on another worker, the chief failed.
    """
    if not replication.spans_processes(strategy):
        return _look(directory, best, prepare)
    failed, read = None, None
    if strategy.extended.should_checkpoint:
        try:
            read = _look(directory, best, prepare)
        except (InputError, MachineError) as error:
            failed = error
    state = _FAILED if failed else _FOUND if read else _NOTHING
    (state,) = broadcast.sum_from_chief(strategy, [state])
    if failed is not None:
        raise failed
    if state == _FAILED:
        raise MachineError(f"The chief worker cannot use the checkpoints in {directory}: see its error.")
    if state == _NOTHING:
        return None
    parts = (*read.files, read.position.directory.name.encode()) if read else (b"", b"", b"")
    content, text, name = (broadcast.bytes_from_chief(strategy, part) for part in parts)
    return read or storage.decode(content, text, directory / name.decode())


def load(read: Snapshot, model: keras.Model) -> None:
    """Gives a model and its optimizer the state of a checkpoint, except for the metrics.

    The metrics' variables may not exist before the first step.

    Raises:
        InputError: the checkpoint belongs to another model or optimizer.
    """
    data_position.build(model)
    arrays = {name: value for name, value in read.arrays.items() if not name.startswith("metrics/")}
    training_state.put(model, arrays, str(read.position.directory))


def wait_for_chief(strategy: tf.distribute.Strategy) -> None:
    """Returns on every worker when the chief has come here. On several workers, each must call it."""
    if replication.spans_processes(strategy):
        broadcast.sum_from_chief(strategy, [1])


def _look(directory: Path, best: Best | None, prepare: bool) -> Snapshot | None:
    if prepare:
        try:
            storage.check_writable(directory)
        except OSError as error:
            raise MachineError(
                f"Checkpoints cannot be written to {directory}: {error}. Give write access there, make room, or choose "
                "another directory."
            ) from error
        storage.sweep(directory)
    try:
        newest = storage.newest(directory)
        return _best(directory, newest, best) if best and newest else newest
    except Damaged as error:
        raise InputError(str(error)) from error


def _best(directory: Path, newest: Snapshot, best: Best) -> Snapshot:
    rows = newest.position.history
    at = best.place(rows)
    if at is None:
        raise InputError(f"{newest.position.directory} knows no best epoch: its logs do not have the entry.")
    epoch = newest.position.epoch - len(rows) + at + 1
    return storage.read(directory / storage.Position(epoch).name)
