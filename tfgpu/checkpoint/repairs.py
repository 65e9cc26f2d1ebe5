"""`BackupAndRestore`."""

import contextlib
import tempfile

import keras

from tfgpu.checkpoint import backup_and_restore
from tfgpu.repairs import Repair, probing


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


REPAIRS = (
    Repair(
        name="resume-within-epoch",
        fault=(
            "BackupAndRestore saves the batch and never reads it: the epoch starts over with weights from its middle"
        ),
        issue="https://github.com/keras-team/keras-hub/issues/204",
        probe=resumed_epoch_repeats,
        apply=backup_and_restore.resume_within_the_epoch,
    ),
)
