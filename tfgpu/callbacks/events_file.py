"""Each epoch's logs for TensorBoard, written in the background."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpu.checkpoint.background_writer import Writer

_VALIDATION = "val_"


class EventsFile(keras.callbacks.Callback):
    """Writes epochs' logs for TensorBoard in the background; Keras's `TensorBoard` writes more, while training waits.

    `train/` and `validation/` hold them under the names that Keras's `TensorBoard` uses (`epoch_loss`, ...), one value
    per epoch. For histograms, profiles or values of single batches use Keras's callback. Put this one after
    callbacks that add to the logs.

    Args:
        directory: where the event files go; None writes none (on a worker that is not the chief).
        writer: writes the files; it can be shared with other callbacks. Default: a new one.

    Raises:
        MachineError: an event could not be written; raised at the end of the next epoch or of the training. If a
            `Checkpoint` on several workers has the same writer, that raises it, on all workers.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(tf.ones((2, 1)), tf.ones((2, 1)), callbacks=[EventsFile("logs")], verbose=0)
        >>> [path.name for path in Path("logs").iterdir()]
        ['train']
    """

    every_batch = False

    def __init__(self, directory: str | Path | None, *, writer: Writer | None = None):
        super().__init__()
        self._directory = Path(directory) if directory else None
        self._writer = writer or Writer()
        self._files: dict[str, tf.summary.SummaryWriter] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._directory is not None and logs:
            values = {name: float(value) for name, value in logs.items()}
            self._put(lambda: self._write(epoch, values))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._directory is not None:
            self._put(self._close)
            if not self._writer.is_led:
                self._writer.wait()

    def _put(self, write: Callable[[], None]) -> None:
        self._writer.put(self._directory, write, raises=not self._writer.is_led)

    def _write(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            part = "validation" if name.startswith(_VALIDATION) else "train"
            if part not in self._files:
                self._files[part] = tf.summary.create_file_writer(str(self._directory / part))
            with self._files[part].as_default():
                tf.summary.scalar(f"epoch_{name.removeprefix(_VALIDATION)}", value, step=epoch)
        for file in self._files.values():
            file.flush()

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()
