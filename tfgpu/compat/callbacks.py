"""What Keras callbacks hold."""

import os
from dataclasses import dataclass

import keras

SET_BY_FIT = frozenset({"params", "model", "_model", "validation_data"})
"""The attributes that `fit` sets on a callback."""


@dataclass(frozen=True)
class BackupFiles:
    """The files of a `BackupAndRestore`."""

    weights: str
    metadata: str
    previous_weights: str
    previous_metadata: str


def backup_files(callback: keras.callbacks.BackupAndRestore) -> BackupFiles:
    """Where a `BackupAndRestore` writes and reads."""
    return BackupFiles(
        callback._weights_path,
        callback._training_metadata_path,
        callback._prev_weights_path,
        callback._prev_training_metadata_path,
    )


def read_backup_from(callback: keras.callbacks.BackupAndRestore, folder: str | os.PathLike) -> None:
    """Makes a `BackupAndRestore` use files of the same names in another folder."""
    for name in ("_weights_path", "_training_metadata_path"):
        setattr(callback, name, os.path.join(folder, os.path.basename(getattr(callback, name))))


def backup_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """The epoch, from 0, that a `BackupAndRestore` writes into the next backup."""
    return callback._current_epoch


def batches_since_save(callback: keras.callbacks.Callback) -> int:
    """How many batches a callback with `save_freq` has counted since it last saved."""
    return getattr(callback, "_batches_seen_since_last_saving", 0)


def traces_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a `TensorBoard` profiles batches."""
    return getattr(callback, "_should_trace", False)


def set_backup_position(callback: keras.callbacks.BackupAndRestore, epoch: int, batch: int) -> None:
    """Sets the epoch and the batch, from 0, that a `BackupAndRestore` counts from."""
    callback._current_epoch, callback._last_batch_seen = epoch, batch
