"""Sends progress to the program that launched the workers."""

from typing import Any

import keras

from tfgpu.launch.functions.pickled import report


class Report(keras.callbacks.Callback):
    """Sends each epoch's logs to `on_progress` of `tfgpu.launch.ray_job` or `spark_job`; elsewhere does nothing.

    Example:
        model.fit(x, y, epochs=3, callbacks=[tfgpu.callbacks.Report()])
    """

    every_batch = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        report({"epoch": epoch, **(logs or {})})
