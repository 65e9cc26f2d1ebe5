"""The metrics of a run as a CSV file with one row per epoch, and as events for TensorBoard."""

import csv
import functools
import io
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpu import atomic
from tfgpu.callbacks.memory import is_peak
from tfgpu.checkpoint.background_writer import Writer

_LAST = ("learning_rate", "step_time_s", "epoch_time_s")


class MetricsFile(keras.callbacks.Callback):
    """Writes the logs as CSV, as Keras's `CSVLogger`, and adds times and learning rate to them for other callbacks.

    Put it before callbacks that store the logs (checkpoint, TensorBoard), so that they get the times too. The file is
    written in the background and replaced atomically; `fit` waits for it at the end.

    Args:
        path: the CSV file; None writes no file (on a worker that is not the chief) but still measures times.
        rows: the rows of finished epochs, as stored in a checkpoint; new rows are appended.
        writer: writes the file; it can be shared with other callbacks. Default: a new one.

    The columns are `epoch` (from 1), the metrics, `learning_rate` (at the end of the epoch), `step_time_s`
    (median seconds per step; a call that runs many steps counts as its time divided by their number), `epoch_time_s`
    (seconds, without validation), and the memory peaks if `Memory` comes before it.

    Raises:
        MachineError: the file could not be written; raised at the end of the next epoch or of the training. If a
            `Checkpoint` on several workers has the same writer, that raises it, on all workers.

    Example:
        model.fit(x, y, callbacks=[MetricsFile("run/metrics.csv")])
    """

    every_batch = False  # Blocks of steps are enough for tfgpu's own loop.

    def __init__(
        self, path: str | Path | None, *, rows: Iterable[Mapping[str, float]] = (), writer: Writer | None = None
    ):
        super().__init__()
        self._writer = writer or Writer()
        self.rows: list[dict[str, float]] = [dict(row) for row in rows]
        self._path = Path(path) if path else None
        self._step_times: list[float] = []
        self._begun = self._epoch_begun = self._last_end = 0.0
        self._first = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._step_times = []
        self._epoch_begun = self._last_end = time.perf_counter()
        del self.rows[epoch:]

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._first = batch
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._last_end = time.perf_counter()
        steps = batch - self._first + 1
        # One entry per step, so that a block of 50 steps weighs as much as 50 single ones.
        self._step_times.extend([(self._last_end - self._begun) / steps] * steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        logs["step_time_s"] = statistics.median(self._step_times) if self._step_times else 0.0
        logs["epoch_time_s"] = self._last_end - self._epoch_begun
        self.rows.append({name: float(value) for name, value in logs.items()})
        self.write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._writer.is_led:
            self._writer.wait()

    def write(self) -> None:
        """Passes the current rows to the writer; does nothing without a path or rows."""
        if self._path is None or not self.rows:
            return
        names = dict.fromkeys(name for row in self.rows for name in row if name not in (*_LAST, "epoch"))
        peaks = [name for name in names if is_peak(name)]
        metrics = [name for name in names if name not in peaks]
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", *metrics, *_LAST, *peaks], restval="", lineterminator="\n")
        table.writeheader()
        for number, row in enumerate(self.rows, start=1):
            table.writerow({**row, "epoch": number})
        write = functools.partial(atomic.write_text, self._path, text.getvalue())
        self._writer.put(self._path, write, raises=not self._writer.is_led)


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
        for file in self._files.values():
            file.close()
        self._files = {}
