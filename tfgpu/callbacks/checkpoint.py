"""Checkpoints of a run: whole or not there, checked by hash, restored on any number of replicas."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors.numpy
import tensorflow as tf

from tfgpu.callbacks.background import Writer
from tfgpu.errors import InputError, MachineError
from tfgpu.keras_fixes import coordinating, tables

_log = logging.getLogger(__name__)

STATE, FACTS = "state.safetensors", "facts.json"
_PREFIX = "epoch-"


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        epoch: the next epoch to run, from 0; so many are done.
        history: one mapping of logs for each epoch that is done.
        directory: the checkpoint that it was read from.
    """

    epoch: int
    history: tuple[dict[str, float], ...] = field(default=(), repr=False)
    directory: Path | None = None


class Checkpoint(keras.callbacks.Callback):
    """Saves model, optimizer and random states at each epoch's end, and restores the newest whole checkpoint.

    A checkpoint is a folder `epoch-0003/` with the arrays (safetensors, which cannot hold code) and a JSON file with
    the arrays' hash, the epoch and the history. It is written aside and renamed, so that a death while saving leaves
    the ones before as they were. The arrays are copied at the epoch's end, the files written in the background; `fit`
    ends when all are there. Put it behind callbacks that add to the logs.

    Args:
        directory: where the checkpoints go; made when first needed.
        keep: how many of the newest to keep (default 3).
        data: a `tfgpu.data.Data` whose position is set at restoring.
        is_chief: False on a worker that must not write; it still restores.
        writer: writes the files; others may use the same. Default: one of its own.

    Raises:
        InputError: `keep` is not a whole number from 1.
        MachineError: at the next epoch's end, at the end of training or when restoring, if one could not be written.

    Example:
        checkpoint = tfgpu.callbacks.Checkpoint("run/checkpoints", data=data)
        position = checkpoint.restore(model)  # None in a new run
        first = position.epoch if position else 0
        model.fit(data.train, initial_epoch=first, epochs=10, callbacks=[checkpoint])
    """

    every_batch = False

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        data=None,
        is_chief: bool = True,
        writer: Writer | None = None,
    ):
        super().__init__()
        if not isinstance(keep, int) or keep < 1:
            raise InputError(f"`keep` must be a whole number from 1. Received: {keep!r}.")
        self._directory = Path(directory)
        self._keep, self._data, self._is_chief = keep, data, is_chief
        self._writer = writer or Writer(most=1)
        self._history: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._history = self._history[:epoch]
        self._history.append({name: float(value) for name, value in (logs or {}).items()})
        if self._is_chief:
            path = self._directory / f"{_PREFIX}{epoch + 1:04d}"
            arrays, position = copied(self.model), Position(epoch + 1, tuple(self._history))
            self._writer.put(path, lambda: self._save(path, arrays, position))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._writer.wait()

    def _save(self, path: Path, arrays: dict[str, np.ndarray], position: Position) -> None:
        save(path, arrays, position)
        for old in found(self._directory)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, model: keras.Model) -> Position | None:
        """Reads the newest whole checkpoint into the model, its optimizer and the data's position.

        One that is damaged is named in a warning, and the one before it is taken.

        Args:
            model: the compiled model, built, with the variables that the checkpoint was made of.

        Returns:
            Where to go on, or None where there is no checkpoint.

        Raises:
            InputError: the checkpoint belongs to another model or optimizer, or all checkpoints are damaged.
            MachineError: the workers of a cluster do not see the same checkpoint; or an earlier write has failed.
        """
        self._writer.wait()
        position = None
        candidates = found(self._directory)
        for candidate in candidates:
            try:
                arrays, facts = _read(candidate)
            except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
                _log.warning("Checkpoint %s is damaged (%s): the one before it is used.", candidate, error)
                continue
            _put_into(model, arrays, candidate)
            position = Position(facts["epoch"], tuple(facts["history"]), candidate)
            break
        if candidates and position is None:
            raise InputError(f"All checkpoints in {self._directory} are damaged. Start again with --overwrite.")
        _check_workers_agree(model, position)
        if position is None:
            return None
        self._history = [dict(row) for row in position.history]
        if self._data is not None:
            self._data.seek(position.epoch)
        return position


def found(directory: str | Path) -> list[Path]:
    """The checkpoints in a folder, newest first; unfinished ones do not count."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if path.name.startswith(_PREFIX) and path.name[len(_PREFIX) :].isdigit())
    return sorted(named, key=epoch_of, reverse=True)


def epoch_of(checkpoint: Path) -> int:
    """The number of epochs that a checkpoint holds.

    Example:
        >>> epoch_of(Path("run/checkpoints/epoch-0003"))
        3
    """
    return int(checkpoint.name[len(_PREFIX) :])


def copied(model: keras.Model) -> dict[str, np.ndarray]:
    """The state of a model and its optimizer as it is now, which further training leaves alone."""
    coordinating.settle(model)
    return {name: _to_plain(np.array(v.numpy())) for name, v in _variables(model).items()}


def save(path: Path, arrays: dict[str, np.ndarray], position: Position) -> None:
    """Writes one checkpoint folder: aside, flushed to the disk, then renamed."""
    content = safetensors.numpy.save(arrays)
    facts = {
        "epoch": position.epoch,
        "history": list(position.history),
        "sha256": hashlib.sha256(content).hexdigest(),
        "versions": {"keras": keras.__version__, "tensorflow": tf.__version__},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        _write(aside / STATE, content)
        _write(aside / FACTS, json.dumps(facts, indent=1).encode())
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside.with_name(f"{aside.name}.old"))
        os.rename(aside, path)
    finally:
        for left in (aside, aside.with_name(f"{aside.name}.old")):
            shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    facts = json.loads((path / FACTS).read_text())
    content = (path / STATE).read_bytes()
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        raise ValueError(f"{STATE} does not have the hash that {FACTS} says")
    return safetensors.numpy.load(content), facts


def _variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Everything that training changes, by a name that does not depend on the number of replicas."""
    groups = {"model": tables.whole(model.variables)}
    if model.optimizer is not None:
        if not model.optimizer.built:
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
        groups["optimizer"] = tables.whole(model.optimizer.variables)
    return {f"{group}/{at:04d}": v for group, variables in groups.items() for at, v in enumerate(variables)}


def _put_into(model: keras.Model, arrays: dict[str, np.ndarray], path: Path) -> None:
    variables = _variables(model)
    if variables.keys() != arrays.keys():
        raise InputError(
            f"{path} has {len(arrays)} arrays, this model with its optimizer has {len(variables)}. "
            "Resume with the model and optimizer of the run."
        )
    for name, v in variables.items():
        if tuple(v.shape) != arrays[name].shape:
            raise InputError(
                f"{path} has {arrays[name].shape} for {v.path}, this model has {tuple(v.shape)}. "
                "Resume with the model and optimizer of the run."
            )
    for name, v in variables.items():
        v.assign(_from_plain(arrays[name], v))


def _to_plain(value) -> np.ndarray:
    """bfloat16 and its like as whole numbers of the same bits: safetensors reads no other form of them into NumPy."""
    value = np.asarray(value)
    return value.view(f"u{value.itemsize}") if value.dtype.kind == "V" else value


def _from_plain(array: np.ndarray, variable: keras.Variable) -> np.ndarray:
    dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    return array.view(dtype) if dtype.kind == "V" else array


def _check_workers_agree(model: keras.Model, position: Position | None) -> None:
    """Workers that go on from different epochs would wait for each other for ever."""
    strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    mine = float(position.epoch if position else 0)
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(mine)), axis=None)
    if float(total) != mine * strategy.num_replicas_in_sync:
        raise MachineError(
            f"The workers found different checkpoints; this one found epoch {mine:.0f}. "
            "Put the run directory on a file system that all workers share."
        )
