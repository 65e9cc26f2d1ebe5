"""Checkpoints on several workers: one reads for all, and a failure on one fails all."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import keras
import tensorflow as tf

from tfgpu.checkpoint import data_position, storage
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.storage import Damaged, Snapshot
from tfgpu.core import collectives, replication
from tfgpu.core.state import broadcast, training_state
from tfgpu.errors import InputError, MachineError

_Result = TypeVar("_Result")


def fetch(
    strategy: tf.distribute.Strategy, directory: Path, *, best: Best | None = None, prepare: bool = False
) -> Snapshot | None:
    """Returns the chief's newest undamaged checkpoint, on every worker. On several workers, each must call it.

    The workers' own disks may hold other checkpoints, or none.

    Args:
        strategy: of the model that gets it.
        directory: where the checkpoints are.
        best: take the checkpoint of the best epoch instead of the newest.
        prepare: remove what a killed process left, and check that checkpoints can be written.

    Raises:
        InputError: all checkpoints are damaged.
        MachineError: the directory cannot be written; or, on the other workers, the chief failed.
    """
    is_chief = not replication.spans_processes(strategy) or strategy.extended.should_checkpoint
    look = (lambda: _look(directory, best, prepare)) if is_chief else (lambda: None)
    read = fail_together(strategy, look, f"Using the checkpoints in {directory}")
    if not replication.spans_processes(strategy):
        return read
    (is_there,) = broadcast.sum_from_chief(strategy, [read is not None])
    if not is_there:
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
    training_state.restore_state(model, arrays, str(read.position.directory))


def fail_together(strategy: tf.distribute.Strategy, act: Callable[[], _Result], what: str) -> _Result:
    """Runs `act` on this worker; if it fails on one worker, it fails on all. On several workers, each must call it.

    Otherwise the others would wait in their next collective for one that has left. Returns when all are done.

    Args:
        strategy: of the model that is trained.
        act: what this worker does.
        what: its name, for the error on the workers that did not fail themselves.

    Raises:
        MachineError: it failed on another worker. A worker where it failed raises its own error.
    """
    if not replication.spans_processes(strategy):
        return act()
    failed, result = None, None
    try:
        result = act()
    except Exception as error:
        failed = error
    (count,) = collectives.sum_over_workers(strategy, [failed is not None])
    if failed is not None:
        raise failed
    if count:
        raise MachineError(f"{what} failed on another worker. See that worker's error.")
    return result


def _look(directory: Path, best: Best | None, prepare: bool) -> Snapshot | None:
    if prepare:
        try:
            storage.check_writable(directory)
        except OSError as error:
            raise MachineError(
                f"Checkpoints cannot be written to {directory}: {error}. Grant write access there, free space, or "
                "choose another directory."
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
