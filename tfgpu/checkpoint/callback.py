"""`Checkpoint`: a training that is interrupted and resumed ends like one that was never interrupted."""

import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfgpu import repairs
from tfgpu.checkpoint import data_position, disks, lora, storage
from tfgpu.checkpoint.background_writer import Writer
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.callback_state import CallbackStates, ExtraState
from tfgpu.checkpoint.fetching import fail_together, fetch, load
from tfgpu.checkpoint.parts_writer import PartsWriter
from tfgpu.checkpoint.preemption import Preemption
from tfgpu.checkpoint.run_progress import DataSeeker, RunProgress, plain_logs
from tfgpu.checkpoint.storage import Position, Snapshot
from tfgpu.compat import training
from tfgpu.core import replication, step_blocks
from tfgpu.core.state import parts, training_state
from tfgpu.errors import InputError, whole_number

_log = logging.getLogger(__name__)


class Checkpoint(keras.callbacks.Callback):
    """Resumes `fit` exactly where it stopped: Keras's `BackupAndRestore` and `ModelCheckpoint` in one, for all state.

    It saves everything that training changes, and resumes from the newest intact checkpoint when `fit` begins. The same
    script, started again, ends with the weights and the history of an uninterrupted run, bit for bit on the same
    devices. A complete run trains no further until its `epochs` increase. On SIGTERM it saves after the running block
    of steps and ends the process with exit code 75.

    A checkpoint holds the weights, the optimizer (with its loss scale, averages and accumulated gradients), the metrics
    of the running epoch, the random draws, the data position, the state of the other callbacks, and the history. The
    arrays are copied immediately and written in the background. On several workers, every worker needs the callback:
    each writes its part, and reads what it needs. Without a shared disk workers get files from those that have them.

    Args:
        directory: where the checkpoints go; one directory per `fit`.
        keep: how many of the newest checkpoints to keep (default 3).
        every_steps: also save after this many steps; None saves only at the end of each epoch. Blocks end there.
        best: the entry of the logs whose best epoch is kept in addition, if the logs have it; None keeps none.
        mode: `"min"`, `"max"`, or `"auto"`: `"max"` for accuracies and similar metrics.
        resume: whether to resume from the newest checkpoint when `fit` begins.
        leave_on: signals on which to save and end the process. Python handles signals in the main thread only.
        data: an object with `seek(epoch)`, called at the beginning of each epoch. A `tfgpu.data` dataset that is given
            to `fit` unchanged needs none.
        is_chief: whether this worker decides what a checkpoint is; None asks the strategy. Without a chief
            nothing is written.
        writer: writes the files; may be shared. By default the callback creates one.
        only: `"lora"` leaves out the frozen base of a model with LoRA, which must be in the model when `fit` resumes.
        remember: further state, by name: objects with `state()`, which returns copies of plain values and arrays, and
            `put(state, model)`, such as `Replay` and `ElasticWeights`. For several `fit`s in a row, see
            `tfgpu.callbacks.Tasks`.

    Raises:
        InputError: an argument is out of range; in `fit`, the checkpoint belongs to another model or all are damaged.
        MachineError: a checkpoint could not be written; raised at the beginning, at the next save or at the end, on
            several workers after the next block of steps.
        Preempted: by `fit`, after a signal; the training is saved.

    Example:
        >>> import tfgpu
        >>> with tfgpu.strategies.one_device().scope():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x = keras.ops.ones((4, 1))
        >>> history = model.fit(x, x, epochs=2, verbose=0, callbacks=[Checkpoint("run")])
        >>> history = model.fit(x, x, epochs=5, verbose=0, callbacks=[Checkpoint("run")])  # resumes with the third
        >>> len(history.history["loss"])
        5
    """

    every_batch = False
    on_all_workers = True
    has_memory = False
    go_on = "Start the same command again to resume."
    """How to resume, for the message on preemption."""
    warns_when_over = True
    """Whether a `fit` that has nothing left to train logs a warning."""

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
        only: str | None = None,
    ):
        super().__init__()
        whole_number("keep", keep)
        if every_steps is not None:
            whole_number("every_steps", every_steps)
        if not repairs.repair_keras():
            raise InputError("Checkpoint needs the Keras repairs. Unset TFGPU_REPAIR.")
        self._directory = Path(directory)
        self._keep, self._every, self._best = keep, every_steps, Best(best, mode)
        self._resumes, self._leave_on, self._is_chief = resume, tuple(leave_on), is_chief
        self._data, self._extra_state, self._base = data, ExtraState(remember), lora.FrozenBase(only)
        self._writer = writer or Writer(most=1)
        self._preemption: Preemption | None = None
        self._progress = RunProgress()
        self._read: Snapshot | None = None  # what this `fit` resumes from, until it has reached that position
        self._saved: str | None = None
        self._unsaved: Exception | None = None  # why this worker could not save, until all raise

    # Restoring

    def restore(self, model: keras.Model, *, best: bool = False) -> Position | None:
        """Restores the model, its optimizer and the data position from the newest intact checkpoint, or the best one.

        `fit` does so by itself. A damaged checkpoint is named in a warning, and the previous one is used. A `fit` with
        this callback then resumes from there, at its step, unless `resume` is False.

        Args:
            model: the compiled and built model, with the same variables as when it was saved. On several workers, each
                must call this.
            best: whether to restore the checkpoint of the best epoch.

        Returns:
            The position of the checkpoint, or None if no checkpoint exists.

        Raises:
            InputError: the checkpoint belongs to another model or optimizer, or all checkpoints are damaged.
            MachineError: an earlier write has failed; or, on another worker, the chief could not read.
        """
        self._finish_writing(model)
        read = self._load(model, self._best if best else None)
        if read is not None and self._data is not None:
            self._data.seek(read.position.epoch)
        return read and read.position

    def _load(self, model: keras.Model, best: Best | None = None) -> Snapshot | None:
        read = self._read = fetch(model.distribute_strategy, self._directory, best=best)
        if read is not None:
            load(read, model)  # without the metrics: `on_epoch_begin` fills them
            self._extra_state.put(read, model)
            self._progress.restore(read.position)
        return read

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._run = step_blocks.current()
        if self._run is None:
            raise InputError(
                "Checkpoint needs the Keras repairs before `fit` begins. Create `tfgpu.strategy()`, or call "
                "`tfgpu.repair_keras()`, before `fit`."
            )
        if self._run.stop_request is not None:
            raise InputError("Give `fit` one Checkpoint only: each one resumes the training.")
        self._disks = disks.compare(self.model.distribute_strategy, self._directory, is_chief=self._is_chief)
        self._parts, self._unsaved = PartsWriter(self._directory, self._disks), None
        spans = replication.spans_processes(self.model.distribute_strategy)
        self._preemption = Preemption(spans=spans, go_on=self.go_on, must_stop=self._must_stop)
        self._run.stop_request = self._preemption
        self._run.exits.enter_context(self._preemption.listening(self._leave_on))
        self._run.exits.enter_context(self._parts)
        self._run.exits.enter_context(self._writer)  # A `fit` that fails finishes writing before another one reads.
        if spans:  # else an error would end the chief alone, and the others would wait for it
            self._run.exits.enter_context(self._writer.led())
        if self._every is not None:
            self._run.ends.append(lambda: self._every - self._progress.step % self._every)
        self._progress.first = self._saved = None
        self._source = data_position.source_of(self.model)
        self._seeker = DataSeeker(self._data, self._source)
        self._base.begin(self.model)
        traced = self.model.train_function
        if self._read is None and self._resumes:
            self._load(self.model)
        if traced is not None and self.model.train_function is None:  # restoring has added a penalty to the model
            self.model.make_train_function()
        if self._read is not None and self._resumes:
            self._resume(self._read)

    def _resume(self, read: Snapshot) -> None:
        position, epochs = read.position, self.params["epochs"]
        if position.epoch >= epochs or (position.over_at is not None and epochs <= position.over_at):
            if self.warns_when_over:
                _log.warning("%s: this run is complete; increase `epochs` to continue.", position.directory)
            data_position.begin_at(self.model, epochs)
            training_state.restore_random_states(read.memory["random"])
            return
        self._progress.first, self._seeker.first_epoch = position.first, position.data_epoch
        if (position.done or self._source.is_stream) and self._source.may_differ:
            _log.warning("The order of the data may differ from the interrupted run: %s.", self._source.may_differ)
        _log.info("Resuming from %s: epoch %d, %d steps done.", position.directory, position.epoch + 1, position.done)
        if self._source.is_stream:
            self._seeker.seek(position.first)
        first = position.epoch if self._seeker.is_possible else position.first
        data_position.resume_at(
            self.model,
            data_position.DataPosition(position.epoch, position.done, first, position.logs),
            (read.memory["random_at_epoch"], read.memory["random"]),
        )

    def after_train_begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Restores the state of the callbacks, once all of them have begun."""
        self._callback_states = CallbackStates(callbacks.callbacks)
        if self._read is not None and self._resumes:
            self._callback_states.put(self._read.memory["callbacks"])

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        resumed = data_position.position_of(self.model)
        if self._read is not None and resumed is not None and resumed.epoch == epoch:
            training_state.restore_metrics(self.model, self._read.arrays)
            self._random = self._read.memory["random_at_epoch"]
        else:
            self._random = training_state.random_states()
            if self._progress.begin_epoch(epoch):
                self._seeker.begin(epoch)
        self._read, self._resumes = None, False  # the next `fit` of this callback continues from here
        if self._seeker.is_possible:
            self._seeker.seek(epoch)

    # Saving

    def after_train_batch(self, callbacks: keras.callbacks.CallbackList, batch: int) -> None:
        """Saves if due, once all callbacks have seen the batch."""
        before = self._progress.step
        self._progress.done = min(batch + 1, self.params.get("steps") or batch + 1)
        if self._preemption.is_due:
            self._save(callbacks, self._position(), metrics=True)
            self._leave()
        elif self._every is not None and self._progress.step // self._every > before // self._every:
            self._save(callbacks, self._position(), metrics=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._draws = training_state.copy_draws(self.model), training_state.random_states()

    def after_test_batch(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Ends the process in the middle of a validation, if it was asked to."""
        run = step_blocks.current()
        if self._preemption is None or run.stop_request is not self._preemption or not self._preemption.is_due:
            return
        # The resumed run repeats the whole validation, from the state at its beginning.
        draws, random = self._draws
        self._save(callbacks, self._position(logs=plain_logs(self._run.logs)), draws=draws, random=random)
        self._leave()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._logs = logs  # later callbacks may still add to them

    def after_epoch(self, callbacks: keras.callbacks.CallbackList, epoch: int) -> None:
        """Saves once all callbacks have seen the end of the epoch."""
        self._progress.end_epoch(epoch, plain_logs(self._logs))
        epochs = self.params["epochs"]
        over_at = epochs if self.model.stop_training else None
        self._random = training_state.random_states()
        self._save(callbacks, self._position(epoch=epoch + 1, over_at=over_at), random=self._random)
        if self._preemption.is_due and over_at is None and epoch + 1 < epochs:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._read = None
        self._finish_writing(self.model)

    def _position(self, **facts) -> Position:
        return self._progress.position(data_epoch=self._seeker.first_epoch, **facts)

    def _save(self, callbacks, position: Position, *, draws=None, random=None, metrics: bool = False) -> None:
        """Copies the state and hands it to the background writer. On several workers, each calls it at the same step.

        There a failed save raises nothing here, or the other workers would wait: all stop after the next block.
        """
        if position.name == self._saved:
            return
        self._saved = position.name
        training.wait_for_callbacks(callbacks)
        if not self._disks.writes:
            training_state.settle(self.model)
            return
        saved = parts.copy(self.model, metrics=metrics, instead=draws, without=self._base.names)
        path = self._directory / position.name
        is_alone = self._disks.count == 1
        try:
            memory = self._memory(random) if self._disks.is_chief else None
            write = self._parts.job(position, saved, memory, lambda path: self._prune(path, position))
        except Exception as error:
            if is_alone:
                raise
            self._unsaved, write = self._unsaved or error, self._parts.no_job(position)
        # Waits until all workers have written the save before the last. For failures see `_must_stop`.
        self._writer.put(path, write, raises=is_alone)

    def _memory(self, random) -> dict[str, Any]:
        return {
            "callbacks": self._callback_states.take(),
            "random": random or training_state.random_states(),
            "random_at_epoch": self._random,
            "paths": training_state.paths(self.model),
            **self._extra_state.take(),
            **self._base.facts,
        }

    def _prune(self, path: Path, position: Position) -> None:
        storage.prune(self._directory, path, keep=self._keep, best=self._best.epoch(position))

    def _leave(self) -> None:
        """Ends the process once all is written.

        Raises:
            Preempted: always.
        """
        self._finish_writing(self.model)
        raise self._preemption.leave(f"The training is saved in {self._directory / self._saved}.")

    def _finish_writing(self, model: keras.Model) -> None:
        """Returns when everything is written. On several workers, each must call it."""
        fail_together(model.distribute_strategy, self._wait, f"Writing to {self._directory}")

    def _wait(self) -> None:
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is not None:
            raise unsaved
        self._writer.wait()

    def _must_stop(self) -> bool:
        """Whether a save has failed, so that all workers stop after the same block and raise the error."""
        return self._unsaved is not None or self._writer.has_failed
