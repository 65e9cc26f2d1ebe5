"""Supervises a run's training: its position, a diverging loss, signals, and messages for each kind of ending."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from tfgpu.checkpoint.storage import found, place_of
from tfgpu.data import Data
from tfgpu.errors import MachineError, OutOfMemory
from tfgpu.recipes import directory
from tfgpu.recipes.recipe import Recipe


class TrainingError(RuntimeError):
    """Training started and failed; the message says where, and what may help."""


class Diverged(TrainingError):
    """The loss became NaN or Inf."""


class Watch(keras.callbacks.Callback):
    """Tracks the position of the training, seeks each epoch's data, and stops if the loss is NaN or Inf."""

    every_batch = False  # once per block of steps suffices for tfgpu's loop
    has_memory = False

    def __init__(self, data: Data):
        super().__init__()
        self.epoch = self.steps = 0
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._data.seek(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.steps += 1
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise Diverged(
                f"The loss became {loss} in epoch {self.epoch + 1}, step {batch + 1}. "
                "Lower --learning-rate, add --clip-norm 1, or use --precision float32."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch + 1


def how_to_resume(path: Path | None) -> str:
    """Returns the command that resumes a run; a worker without a directory does not know it."""
    return f"Resume with: tfgpu train --resume --output {path}" if path else "The chief prints how to resume."


def describe_interrupt(path: Path | None, made: list[Path], watch: Watch, *, resume: bool) -> str:
    """Describes what an interrupted run has saved and how to resume it; removes a run without a single step."""
    if path is None:
        return "Interrupted."
    if not watch.steps and not resume:
        directory.abandon(path, made)
        return directory.NOTHING_WRITTEN
    again = how_to_resume(path)
    saved = found(path / directory.CHECKPOINTS)
    if not saved:
        return f"Interrupted in epoch {watch.epoch + 1}, before a checkpoint. {again}"
    epochs, step = place_of(saved[0])
    what = f"Step {step}, in epoch {epochs + 1}," if step else f"Epoch {epochs}"
    return f"Interrupted. {what} is in {path / directory.CHECKPOINTS}. {again}"


def describe_failure(error: Exception, watch: Watch, what: Recipe) -> str:
    """Describes in one line where training failed and, if known, what helps."""
    if isinstance(error, OutOfMemory):
        return (
            f"Training failed in epoch {watch.epoch + 1} with global_batch={what.global_batch}: {error.sizes} Use a "
            "smaller --batch (with --accumulate for the same update), --precision mixed_bfloat16, --recompute, "
            "or more devices."
        )
    if isinstance(error, MachineError):
        return f"Training failed in epoch {watch.epoch + 1}: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else "no message"
    return f"Training failed in epoch {watch.epoch + 1}: {type(error).__name__}: {reason}"


@contextmanager
def unstarted() -> Iterator[None]:
    """Adds a message to an interrupt before anything has been written."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(directory.NOTHING_WRITTEN) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C outside of `fit`, in which checkpoints handle it.

    Overrides the handler that multi-worker strategies set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
