"""Checkpoints on disk: one folder each, complete or absent, verified by hashes, listed newest first.

    epoch-0003/                     three epochs are done
    epoch-0003-step-0000120/        and part of the fourth: 120 steps since the run began
        state.safetensors           the arrays; the format cannot hold code
        facts.json                  the position of the run, the hash of the arrays, and a hash of these facts

A folder is written under a temporary name, flushed to the disk, and renamed. The order comes from
the names, not from file times, so a clock that jumps does no harm.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors.numpy
import tensorflow as tf

from tfgpu import atomic, packing

_log = logging.getLogger(__name__)

STATE, FACTS = "state.safetensors", "facts.json"
ASIDE = ".aside"
"""Suffix of folders that were moved out of the way."""
_GONE = ".gone"
_FORMAT = 2
_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{7,}))?")
_MEMORY = "memory"


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        epoch: the next epoch to run, from 0, which is the number of epochs done.
        history: the logs of the latest epochs, one mapping each.
        directory: the checkpoint that it was read from.
        step: steps done since the run began.
        done: steps of `epoch` done; 0 between epochs.
        first: the epoch with which the run began.
        over_at: the `epochs` of a `fit` that stopped early, as with EarlyStopping; else None.
        logs: the training logs of the epoch, if it was interrupted in its validation.
        data_epoch: the number of the run's first epoch in data that counts its epochs.
    """

    epoch: int
    history: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    directory: Path | None = None
    step: int = 0
    done: int = 0
    first: int = 0
    over_at: int | None = None
    logs: dict[str, Any] | None = None
    data_epoch: int = 0

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder.

        Example:
            >>> Position(3).name, Position(3, step=120, done=20).name
            ('epoch-0003', 'epoch-0003-step-0000120')
        """
        return f"epoch-{self.epoch:04d}" + (f"-step-{self.step:07d}" if self.done else "")


class Damaged(ValueError):
    """A checkpoint cannot be read, or does not contain what was written."""


def place_of(checkpoint: Path) -> tuple[int, int] | None:
    """The number of epochs done and the step (0 between epochs), from a checkpoint's name; None for other names.

    Example:
        >>> place_of(Path("run/epoch-0003")), place_of(Path("epoch-0003-step-0000120")), place_of(Path(".epoch-0003"))
        ((3, 0), (3, 120), None)
    """
    found = _NAME.fullmatch(checkpoint.name)
    return found and (int(found[1]), int(found[2] or 0))


def epoch_of(checkpoint: Path) -> int:
    """The number of epochs done, from a checkpoint's name.

    Example:
        >>> epoch_of(Path("run/checkpoints/epoch-0003"))
        3
    """
    return place_of(checkpoint)[0]


def found(directory: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, newest first."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    return sorted(filter(place_of, folder.iterdir()), key=place_of, reverse=True)


def encode(position: Position, arrays: dict[str, np.ndarray], memory: Any) -> tuple[bytes, bytes]:
    """Returns the contents of the two files.

    Args:
        position: how far the run has come.
        arrays: the state, by name.
        memory: plain values and arrays in lists, tuples and dicts.

    Returns:
        Of `STATE` and of `FACTS`.
    """
    arrays = dict(arrays)
    facts = {
        "format": _FORMAT,
        "epoch": position.epoch,
        "step": position.step,
        "done": position.done,
        "first": position.first,
        "over_at": position.over_at,
        "data_epoch": position.data_epoch,
        "logs": packing.to_json(position.logs, arrays, under=_MEMORY),
        "history": packing.to_json(list(position.history), arrays, under=_MEMORY),
        _MEMORY: packing.to_json(memory, arrays, under=_MEMORY),
        "versions": {"keras": keras.__version__, "tensorflow": tf.__version__},
    }
    content = safetensors.numpy.save(arrays)
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    return content, json.dumps({"facts": facts, "sha256": _hash(facts)}, indent=1).encode()


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was read and verified.

    Attributes:
        position: how far the run has come.
        arrays: the state, by name.
        memory: as given to `encode`.
        files: the contents of `STATE` and of `FACTS`.
    """

    position: Position
    arrays: dict[str, np.ndarray] = field(repr=False)
    memory: Any = field(repr=False)
    files: tuple[bytes, bytes] = field(repr=False)


def decode(content: bytes, text: bytes, source: Path) -> Snapshot:
    """Reverses `encode`.

    Raises:
        Damaged: the contents are not what was written.
    """
    try:
        found = json.loads(text)
        facts = found["facts"]
        if _hash(facts) != found["sha256"]:
            raise Damaged(f"{FACTS} does not match its own hash")
        if hashlib.sha256(content).hexdigest() != facts["sha256"]:
            raise Damaged(f"{STATE} does not match the hash in {FACTS}")
        arrays = safetensors.numpy.load(content)
        plain = {name: facts[name] for name in ("epoch", "step", "done", "first", "over_at", "data_epoch")}
        history, logs = tuple(packing.from_json(facts["history"], arrays)), packing.from_json(facts["logs"], arrays)
        position = Position(directory=source, history=history, logs=logs, **plain)
        state = {name: array for name, array in arrays.items() if not name.startswith(_MEMORY)}
        return Snapshot(position, state, packing.from_json(facts[_MEMORY], arrays), (content, text))
    except Damaged:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def read(path: Path) -> Snapshot:
    """Reads one checkpoint.

    Raises:
        Damaged: it cannot be read, or is not what was written.
    """
    try:
        content, text = (path / STATE).read_bytes(), (path / FACTS).read_bytes()
    except OSError as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    return decode(content, text, path)


def newest(directory: Path) -> Snapshot | None:
    """Reads the newest undamaged checkpoint; warns of damaged ones.

    Returns:
        None if there is no checkpoint.

    Raises:
        Damaged: all checkpoints are damaged.
    """
    candidates = found(directory)
    for candidate in candidates:
        try:
            return read(candidate)
        except Damaged as error:
            _log.warning("Checkpoint %s is damaged (%s); using the previous one.", candidate, error)
    if candidates:
        raise Damaged(
            f"All checkpoints in {directory} are damaged. Choose another directory, or empty this one to start over."
        )
    return None


def write(path: Path, content: bytes, text: bytes) -> None:
    """Writes one checkpoint folder: aside, flushed to the disk, then renamed.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path) as aside:
        aside.mkdir()
        (aside / STATE).write_bytes(content)
        (aside / FACTS).write_bytes(text)


def prune(directory: Path, newest: Path, *, keep: int, best: int | None) -> None:
    """Keeps the newest checkpoints and the best one, and moves checkpoints that claim to be newer out of the way.

    Such a checkpoint is damaged, or belongs to another run in the same folder; the run would resume from it.

    Args:
        directory: the folder of the checkpoints.
        newest: the one that was just written.
        keep: how many to keep.
        best: the number of epochs of one to keep in addition.
    """
    here = place_of(newest)
    for path in found(directory):
        if place_of(path) > here:
            aside = path.with_name(path.name + ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            _log.warning("%s is not of this run, or damaged. It is now %s.", path, aside.name)
    for path in found(directory)[keep:]:
        if place_of(path) != (best, 0):
            _remove(path)


def sweep(directory: Path) -> None:
    """Removes what a killed process left half written; restores what it was about to replace."""
    for old in directory.glob(f".epoch-*{atomic.OLD}"):
        _put_back(old, old.with_name(old.name.split(".")[1]))
    for path in directory.glob(".epoch-*"):
        shutil.rmtree(path, ignore_errors=True)


def check_writable(directory: Path) -> None:
    """Checks that checkpoints can be written.

    Raises:
        OSError: they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".epoch-probe.{os.getpid()}"
    probe.mkdir()
    probe.rmdir()


def _hash(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _put_back(old: Path, path: Path) -> None:
    if old.exists() and not path.exists():
        os.rename(old, path)


def _remove(path: Path) -> None:
    """Renames a checkpoint, then deletes it: a half-deleted one must not appear among the others."""
    gone = path.with_name(f".{path.name}.{os.getpid()}{_GONE}")
    with contextlib.suppress(OSError):
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)
