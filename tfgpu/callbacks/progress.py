"""A progress bar on a terminal, and one line per epoch everywhere."""

import time
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from tfgpu.callbacks.memory import is_peak
from tfgpu.launch.functions.pickled import report

_REDRAW_S = 0.1  # Ten times a second looks smooth; a faster redraw costs more than a small model's step.
_HIDDEN = ("epoch_time_s",)


class Progress(keras.callbacks.Callback):
    """Shows a progress bar, as `fit(verbose=1)`, but updates it once per block of steps instead of every batch.

    The bar shows metrics and remaining time; each finished epoch prints one line. On a narrow terminal this line leaves
    out the peak memory, then the learning rate, the step time and the epoch's time. Without a terminal (a log file, a
    scheduler) only the line per epoch is printed, whole.

    Args:
        console: where to write; None writes to standard output.

    Example:
        model.fit(x, y, epochs=3, verbose=0, callbacks=[Progress()])
    """

    every_batch = False  # Blocks of steps are enough for tfgpu's own loop.
    has_memory = False

    def __init__(self, *, console: Console | None = None):
        super().__init__()
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bars: Bars | None = None
        self._task: Any = None
        self._steps: int | None = None
        self._done = 0
        self._drawn = self._begun = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[metrics]}"),
        )
        self._bars = Bars(*columns, console=self._console, transient=True)
        self._bars.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._done, self._begun = 0, time.perf_counter()
        if self._bars is not None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            total = self.params.get("steps") or self._steps
            self._task = self._bars.add_task(self._name(epoch), total=total, metrics="")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = batch + 1
        now = time.perf_counter()
        if self._bars is not None and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bars.update(self._task, completed=self._done, metrics=line(logs))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._done, metrics="validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = self._done or self._steps
        seconds = time.perf_counter() - self._begun
        wide = self._console.width if self._console.is_terminal else None
        self._console.print(_row(self._name(epoch), logs or {}, f"{seconds:.1f} s", wide), markup=False)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bar and restores the terminal, also after an error."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None

    def _name(self, epoch: int) -> str:
        last = self.params.get("epochs") or epoch + 1
        return f"epoch {epoch + 1:>{len(str(last))}}/{last}"


def _row(name: str, logs: dict[str, Any], seconds: str, wide: int | None) -> str:
    """The line of an epoch, fitted to a terminal of `wide` columns; None: as long as it needs to be."""
    left = dict(logs)
    for is_next in (lambda key: False, is_peak, "learning_rate".__eq__, "step_time_s".__eq__):
        left = {key: value for key, value in left.items() if not is_next(key)}
        row = f"{name}  {line(left)}"
        if wide is None or len(row) + len(seconds) + 2 <= wide:
            return f"{row}  {seconds}"
    return row


def line(logs: dict[str, Any] | None) -> str:
    """Formats metrics: accuracies in percent, times in milliseconds, memory in GiB, the rest with four decimals.

    Example:
        line({"loss": 0.08121, "val_accuracy": 0.986, "step_time_s": 0.0053})
        'loss 0.0812  val_accuracy 98.6%  5.3 ms/step'
    """
    return "  ".join(_item(name, float(value)) for name, value in (logs or {}).items() if name not in _HIDDEN)


def _item(name: str, value: float) -> str:
    if name == "step_time_s":
        return f"{value * 1e3:.1f} ms/step"
    if name == "learning_rate":
        return f"lr {value:.1e}"
    if is_peak(name):
        return f"{name.split('_')[0]} {value / 2**30:.2f} GiB"
    return f"{name} {value:.1%}" if name.endswith("accuracy") else f"{name} {value:.4f}"


class Report(keras.callbacks.Callback):
    """Sends each epoch's logs to `on_progress` of `tfgpu.launch.ray_job` or `spark_job`; elsewhere does nothing.

    Example:
        model.fit(x, y, epochs=3, callbacks=[tfgpu.callbacks.Report()])
    """

    every_batch = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        report({"epoch": epoch, **(logs or {})})
