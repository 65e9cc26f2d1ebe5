"""The facts of a checkpoint: where the run stands, which files hold its arrays, and their hashes.

`facts.json` is written last and has a hash of itself. Format 3 lists one file per worker, and the shapes of arrays
that are split over several files. Format 2, from older versions, has one file with all arrays, and can still be read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors
import tensorflow as tf

from tfgpu import packing
from tfgpu.checkpoint import streamed
from tfgpu.core.state import parts
from tfgpu.core.state.array_slices import ArraySlices

STATE, FACTS = "state.safetensors", "facts.json"
_FORMAT = 3
_FILE = re.compile(r"state(-\d{5}-of-\d{5})?\.safetensors")
_MEMORY = "memory"
_PLAIN = ("epoch", "step", "done", "first", "over_at", "data_epoch")


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


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was verified.

    Attributes:
        position: how far the run has come.
        arrays: the state, by name. They are read from the files when they are asked for, whole or in stretches.
        memory: as given to `facts_of`.
    """

    position: Position
    arrays: Mapping[str, np.ndarray | ArraySlices] = field(repr=False)
    memory: Any = field(repr=False)


@dataclass(frozen=True)
class File:
    """What a checkpoint's facts say about a file: its hash, and its length if they have it."""

    sha256: str
    size: int | None


@dataclass(frozen=True)
class Manifest:
    """Facts that were read.

    Attributes:
        text: as they were written.
        files: by name.
    """

    text: bytes = field(repr=False)
    files: dict[str, File]
    _facts: dict[str, Any] = field(repr=False)

    def open(self, source: Path, paths: Mapping[str, Path]) -> Snapshot:
        """The checkpoint, from files that were verified.

        Args:
            source: the checkpoint's folder.
            paths: where each of its files is.

        Raises:
            Damaged: the files are not what was written.
        """
        try:
            facts = self._facts
            arrays = streamed.open_arrays(paths.values(), facts.get("cut", {}), facts.get("axes", {}))
            state = {name: array for name, array in arrays.items() if not name.startswith(_MEMORY)}
            kept = {name: np.asarray(array) for name, array in arrays.items() if name not in state}
            history, logs = tuple(packing.from_json(facts["history"], kept)), packing.from_json(facts["logs"], kept)
            plain = {name: facts[name] for name in _PLAIN}
            position = Position(directory=source, history=history, logs=logs, **plain)
            return Snapshot(position, state, packing.from_json(facts[_MEMORY], kept))
        except _UNREADABLE as error:
            raise Damaged(f"{type(error).__name__}: {error}") from error


_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError,
)  # fmt: skip


def file_name(rank: int, count: int) -> str:
    """The name of a worker's file.

    Example:
        >>> file_name(0, 1), file_name(0, 2)
        ('state.safetensors', 'state-00001-of-00002.safetensors')
    """
    return STATE if count == 1 else f"state-{rank + 1:05d}-of-{count:05d}.safetensors"


def facts_of(position: Position, memory: Any, saved: parts.StateParts) -> tuple[dict[str, Any], list[parts.Stored]]:
    """The facts except those about the files, and the arrays that go to the chief's file.

    Args:
        position: how far the run has come.
        memory: plain values and arrays in lists, tuples and dicts.
        saved: what the chief saves of the state.
    """
    arrays = {}
    facts = {
        "format": _FORMAT,
        **{name: getattr(position, name) for name in _PLAIN},
        "logs": packing.to_json(position.logs, arrays, under=_MEMORY),
        "history": packing.to_json(list(position.history), arrays, under=_MEMORY),
        _MEMORY: packing.to_json(memory, arrays, under=_MEMORY),
        "versions": {"keras": keras.__version__, "tensorflow": tf.__version__},
        "cut": saved.cut,
        "axes": saved.axes,
    }
    return facts, [parts.as_stored(name, array) for name, array in arrays.items()]


def text_of(facts: dict[str, Any], files: Mapping[str, tuple[str, int]]) -> bytes:
    """The content of `FACTS`.

    Args:
        facts: from `facts_of`.
        files: the hash and the size of each file, in bytes.
    """
    facts = {**facts, "files": {name: {"sha256": sha256, "bytes": size} for name, (sha256, size) in files.items()}}
    facts = json.loads(json.dumps(facts))  # tuples are lists, as a reader finds them
    return json.dumps({"facts": facts, "sha256": _hash(facts)}, indent=1).encode()


def parse(text: bytes) -> Manifest:
    """Reads the content of `FACTS`.

    Raises:
        Damaged: it is not what was written.
    """
    try:
        found = json.loads(text)
        facts = found["facts"]
        if _hash(facts) != found["sha256"]:
            raise Damaged(f"{FACTS} does not match its own hash")
        if facts["format"] > _FORMAT:
            raise Damaged(f"its format is {facts['format']}, written by a later tfgpu")
        if facts["format"] < _FORMAT:
            return Manifest(text, {STATE: File(str(facts["sha256"]), None)}, facts)
        files = {name: File(str(each["sha256"]), int(each["bytes"])) for name, each in facts["files"].items()}
        if not files or not all(map(_FILE.fullmatch, files)):
            raise Damaged(f"{FACTS} names other files: {sorted(files)}")
        return Manifest(text, files, facts)
    except Damaged:
        raise
    except _UNREADABLE as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _hash(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
