"""`Checkpoint`: a training that stops anywhere, and is started again, ends as one that never stopped."""

import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfgpu import repairs
from tfgpu.checkpoint import callback_hooks, data_position, storage
from tfgpu.checkpoint.background_writer import Writer
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.callback_state import CallbackStates
from tfgpu.checkpoint.extra_state import Remembered
from tfgpu.checkpoint.fetching import fail_together, fetch, load
from tfgpu.checkpoint.preemption import Leaving
from tfgpu.checkpoint.storage import Position, Snapshot
from tfgpu.core import replication, step_blocks, training_state
from tfgpu.errors import InputError, whole_number
from tfgpu.repairs import saving

_log = logging.getLogger(__name__)


class Checkpoint(keras.callbacks.Callback):
    """Saves all that a training changes, and goes on from the newest whole checkpoint when `fit` begins.

    Started again, the same script goes on at the step where the newest checkpoint was made, and ends with the weights
    and the history of a run that never stopped, bit for bit on the same devices. A run that is over trains nothing
    more, until its `epochs` grow. On SIGTERM it saves after the running block of steps and ends the process with
    exit code 75.

    Saved are: weights; the optimizer with its loss scale, averages and gradients that wait; the metrics of the running
    epoch; the random draws; the place in the data; what the other callbacks remember; the history. The arrays are
    copied at once and written in the background. On several workers every one has the callback: the chief writes, and
    all get what the chief has read, whatever their own disks hold.

    Args:
        directory: where the checkpoints go; one directory a `fit`.
        keep: how many of the newest to keep (default 3).
        every_steps: save after so many steps too; None at epochs' ends alone. Blocks of steps end there.
        best: the entry of the logs whose best epoch is kept besides, where the logs have it; None keeps none.
        mode: `"min"`, `"max"`, or `"auto"`: `"max"` for accuracies and their like.
        resume: go on from the newest checkpoint when `fit` begins.
        leave_on: signals on which to save and leave. Python can listen in the main thread alone.
        data: what has a `seek(epoch)`, called as each epoch begins. A `tfgpu.data` data set that is given to `fit` as
            it is needs none.
        is_chief: whether this worker writes; None asks the strategy.
        writer: writes the files; others may use the same. Default: one of its own.
        remember: what else belongs to the training, by name: objects with `state()`, which gives plain values and
            arrays (copies), and `put(state, model)`, such as `Replay` and `ElasticWeights`. Several `fit`s, one after
            the other: see `tfgpu.callbacks.Tasks`.

    Raises:
        InputError: an argument is out of range; in `fit`, the checkpoint belongs to another model or all are damaged.
        MachineError: one could not be written: at the beginning, at the next save, or at the end of the training.
        Preempted: by `fit`, after a signal: the training is saved.

    Example:
        >>> import tfgpu
        >>> with tfgpu.strategy("one_device").scope():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x = np.ones((4, 1))
        >>> history = model.fit(x, x, epochs=2, verbose=0, callbacks=[Checkpoint("run")])
        >>> history = model.fit(x, x, epochs=5, verbose=0, callbacks=[Checkpoint("run")])  # goes on with the third
        >>> len(history.history["loss"])
        5
    """

    every_batch = False
    on_all_workers = True
    has_memory = False
    go_on = "Start the same command again to go on."
    """What the message says where the training is asked to leave."""
    warns_when_over = True
    """Whether a `fit` that has nothing left to train says so."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        every_steps: int | None = None,
        best: str | None = "val_loss",
        mode: str = "auto",
        resume: bool = True,
        leave_on: Sequence[signal.Signals] = (signal.SIGTERM,),
        data: Any = None,
        is_chief: bool | None = None,
        writer: Writer | None = None,
        remember: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        _check_count("keep", keep)
        if every_steps is not None:
            _check_count("every_steps", every_steps)
        if not repairs.repair_keras():
            raise InputError("Checkpoint needs the Keras repairs. Unset TFGPU_REPAIR.")
        self._directory = Path(directory)
        self._keep, self._every, self._best = keep, every_steps, Best(best, mode)
        self._resumes, self._leave_on, self._is_chief = resume, tuple(leave_on), is_chief
        self._data = data
        self._remembered = Remembered(remember)
        self._writer = writer or Writer(most=1)
        self._leaving: Leaving | None = None
        self._rows: list[dict[str, Any]] = []  # of the epochs from `_rows_at` on
        self._read: Snapshot | None = None  # what this `fit` goes on from, until it is there
        self._rows_at = self._before = self._done = self._data_epoch = 0  # `_before`: steps before this epoch
        self._first: int | None = None  # the epoch with which this `fit` began, before any interruption
        self._saved: str | None = None

    # Going on

    def restore(self, model: keras.Model, *, best: bool = False) -> Position | None:
        """Reads the newest whole checkpoint, or the best one, into the model, its optimizer and the data's position.

        `fit` does so by itself. One that is damaged is named in a warning, and the one before it is taken. A `fit`
        with this callback then goes on from there, at its step, unless `resume` is False.

        Args:
            model: the compiled model, built, with the variables that the checkpoint was made of. On several workers,
                each must call this.
            best: take the checkpoint of the best epoch.

        Returns:
            Where to go on, or None where there is no checkpoint.

        Raises:
            InputError: the checkpoint belongs to another model or optimizer, or all checkpoints are damaged.
            MachineError: an earlier write has failed; or, on another worker, the chief could not read.
        """
        self._finish_writing(model)
        read = self._load(model, self._best if best else None)
        if read is not None and self._data is not None:
            self._data.seek(read.position.epoch)
        return read and read.position

    def _load(self, model: keras.Model, best: Best | None = None, *, prepare: bool = False) -> Snapshot | None:
        read = self._read = fetch(model.distribute_strategy, self._directory, best=best, prepare=prepare)
        if read is not None:
            position = read.position
            load(read, model)  # without the metrics: `on_epoch_begin` fills them
            self._remembered.put(read, model)
            self._rows = [dict(row) for row in position.history]
            self._rows_at = position.epoch - len(self._rows)
            self._before, self._done = position.step - position.done, position.done
        return read

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._run = step_blocks.current()
        if self._run is None:
            raise InputError(
                "Keras was not repaired when `fit` began, which Checkpoint needs. Make `tfgpu.strategy()`, or call "
                "`tfgpu.repair_keras()`, in a line before `fit`."
            )
        if self._run.leaving is not None:
            raise InputError("Give `fit` one Checkpoint: two would say where to go on.")
        self._writes = saving.writes(self.model) if self._is_chief is None else self._is_chief
        spans = replication.spans_processes(self.model.distribute_strategy)
        self._leaving = self._run.leaving = Leaving(spans=spans, go_on=self.go_on)
        self._run.exits.enter_context(self._leaving.listening(self._leave_on))
        self._run.exits.enter_context(self._writer)  # A `fit` that fails has written, too, before another one reads.
        if self._every is not None:
            self._run.ends.append(lambda: self._every - self._step % self._every)
        self._first = self._saved = None
        self._source = data_position.source_of(self.model)
        traced = self.model.train_function
        if self._read is None and self._resumes:
            self._load(self.model, prepare=self._writes)
        if traced is not None and self.model.train_function is None:  # a penalty came to the model
            self.model.make_train_function()
        if self._read is not None and self._resumes:
            self._take_up(self._read)

    def _take_up(self, read: Snapshot) -> None:
        position, epochs = read.position, self.params["epochs"]
        if position.epoch >= epochs or (position.over_at is not None and epochs <= position.over_at):
            if self.warns_when_over:
                _log.warning("%s: this run is over; raise `epochs` to go on.", position.directory)
            data_position.begin_at(self.model, epochs)
            training_state.restore_random_states(read.memory["random"])
            return
        self._first, self._data_epoch = position.first, position.data_epoch
        if (position.done or self._source.is_stream) and self._source.may_differ:
            _log.warning("The data may come in another order than before: %s.", self._source.may_differ)
        _log.info("Going on from %s: epoch %d, %d steps done.", position.directory, position.epoch + 1, position.done)
        if self._source.is_stream:
            self._seek(position.first)
        first = position.epoch if self._seeks else position.first
        data_position.resume_at(
            self.model,
            data_position.DataPosition(position.epoch, position.done, first, position.logs),
            data_position.SkipHooks(
                lambda: training_state.restore_random_states(read.memory["random_at_epoch"]),
                lambda: training_state.restore_random_states(read.memory["random"]),
            ),
        )

    def after_train_begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Takes up what the callbacks remember, when all of them have begun."""
        self._callback_states = CallbackStates(callbacks.callbacks)
        if self._read is not None and self._resumes:
            self._callback_states.put(self._read.memory["callbacks"])

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        resumed = data_position.position_of(self.model)
        if self._read is not None and resumed is not None and resumed.epoch == epoch:
            training_state.restore_metrics(self.model, self._read.arrays)
            self._random = self._read.memory["random_at_epoch"]
        else:
            self._begin_epoch(epoch)
        self._read, self._resumes = None, False  # the next `fit` goes on from here by itself
        if self._seeks:
            self._seek(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._done, self._random = 0, training_state.random_states()
        if self._first is not None:
            return
        self._first = epoch
        if not self._rows_at <= epoch <= self._rows_at + len(self._rows):
            self._rows, self._rows_at = [], epoch
        self._rows = self._rows[: epoch - self._rows_at]
        if not self._rows:
            self._before = 0
        if self._source.counter is not None:
            self._data_epoch = self._source.counter.next - epoch

    @property
    def _seeks(self) -> bool:
        """Whether the data begins an epoch by its number."""
        return not self._source.is_stream and (self._data is not None or self._source.counter is not None)

    def _seek(self, epoch: int) -> None:
        if self._data is not None:
            self._data.seek(epoch)
        elif self._source.counter is not None:
            self._source.counter.next = self._data_epoch + epoch

    # Saving

    @property
    def _step(self) -> int:
        """Steps that are done since the run began."""
        return self._before + self._done

    def after_train_batch(self, callbacks: keras.callbacks.CallbackList, batch: int) -> None:
        """Saves when all callbacks have seen the batch, where it is time to."""
        before = self._step
        self._done = min(batch + 1, self.params.get("steps") or batch + 1)
        if self._leaving.is_due:
            self._save(callbacks, self._position(), metrics=True)
            self._leave()
        elif self._every is not None and self._step // self._every > before // self._every:
            self._save(callbacks, self._position(), metrics=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._draws = training_state.copy_draws(self.model), training_state.random_states()

    def after_test_batch(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Leaves in the middle of a validation, where that is wished."""
        run = step_blocks.current()
        if self._leaving is None or run.leaving is not self._leaving or not self._leaving.is_due:
            return
        # Another process makes the whole validation anew, from what was there when this one began.
        draws, random = self._draws
        self._save(callbacks, self._position(logs=_row(self._run.logs)), draws=draws, random=random)
        self._leave()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._logs = logs  # callbacks behind this one may still add to them

    def after_epoch(self, callbacks: keras.callbacks.CallbackList, epoch: int) -> None:
        """Saves when all callbacks are done with the epoch."""
        self._rows = [*self._rows[: epoch - self._rows_at], _row(self._logs)]
        self._before, self._done = self._step, 0
        epochs = self.params["epochs"]
        over_at = epochs if self.model.stop_training else None
        self._random = training_state.random_states()
        self._save(callbacks, self._position(epoch=epoch + 1, over_at=over_at), random=self._random)
        if self._leaving.is_due and over_at is None and epoch + 1 < epochs:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._read = None
        self._finish_writing(self.model)

    def _position(self, **facts) -> Position:
        facts = {"epoch": self._rows_at + len(self._rows), "done": self._done, **facts}
        first, history = self._first, tuple(self._rows)
        return Position(step=self._step, first=first, data_epoch=self._data_epoch, history=history, **facts)

    def _save(self, callbacks, position: Position, *, draws=None, random=None, metrics: bool = False) -> None:
        """Copies the state, and hands it to the writer. On several workers, each must call it."""
        if position.name == self._saved:
            return
        self._saved = position.name
        callback_hooks.settle(callbacks)
        arrays = training_state.copy_state(self.model, metrics=metrics, wanted=self._writes)

        def save() -> None:
            if self._writes:
                self._hand_over(position, {**arrays, **(draws or {})}, random)

        fail_together(self.model.distribute_strategy, save, f"Saving {self._directory / position.name}")

    def _hand_over(self, position: Position, arrays: dict[str, np.ndarray], random) -> None:
        memory = {
            "callbacks": self._callback_states.take(),
            "random": random or training_state.random_states(),
            "random_at_epoch": self._random,
            **self._remembered.take(),
        }
        self._writer.put(self._directory / position.name, lambda: self._write(position, arrays, memory))

    def _write(self, position: Position, arrays: dict[str, np.ndarray], memory: dict[str, Any]) -> None:
        path = self._directory / position.name
        storage.write(path, *storage.encode(position, arrays, memory))
        at = self._best.place(position.history)
        best = None if at is None else position.epoch - len(position.history) + at + 1
        storage.prune(self._directory, path, keep=self._keep, best=best)

    def _leave(self) -> None:
        """Ends the process, once the chief has written.

        Raises:
            Preempted: always.
        """
        self._finish_writing(self.model)
        raise self._leaving.leave(f"The training is saved in {self._directory / self._saved}.")

    def _finish_writing(self, model: keras.Model) -> None:
        """Returns when everything is written. On several workers, each must call it."""
        fail_together(model.distribute_strategy, self._writer.wait, f"Writing to {self._directory}")


def _row(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Logs as a checkpoint keeps them: numbers, and arrays."""
    values = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {name: float(value) if value.ndim == 0 else value.copy() for name, value in values.items()}


def _check_count(name: str, value) -> None:
    whole_number(name, value)
