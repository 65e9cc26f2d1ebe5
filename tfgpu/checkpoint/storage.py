"""Checkpoints on disk: one folder each, complete or absent, verified by hashes, listed newest first.

    epoch-0003/                             three epochs are done
    epoch-0003-step-0000120/                and part of the fourth: 120 steps since the run began
        state.safetensors                   the arrays; the format cannot hold code
        facts.json                          the position of the run, the files' hashes, and a hash of these facts
    epoch-0004/                             of two workers: each has written what it holds
        state-00001-of-00002.safetensors
        state-00002-of-00002.safetensors
        facts.json

A folder is written under a temporary name, flushed to the disk, and renamed. The order comes from
the names, not from file times, so a clock that jumps does no harm.
"""

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tfgpu import atomic
from tfgpu.checkpoint import manifest, streamed
from tfgpu.checkpoint.manifest import FACTS, STATE, Damaged, Manifest, Position, Snapshot
from tfgpu.core.state import parts

_log = logging.getLogger(__name__)

ASIDE = ".aside"
"""Suffix of folders that were moved out of the way."""
_GONE = ".gone"
_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{7,}))?")


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


def read(path: Path) -> Snapshot:
    """Verifies one checkpoint and opens it.

    Raises:
        Damaged: it cannot be read, or is not what was written.
    """
    found = read_facts(path)
    for name, file in found.files.items():
        if (reason := why_not_whole(path / name, file)) is not None:
            raise Damaged(reason)
    return found.open(path, {name: path / name for name in found.files})


def read_facts(path: Path) -> Manifest:
    """Reads a checkpoint's facts alone.

    Raises:
        Damaged: they cannot be read, or are not what was written.
    """
    try:
        return manifest.parse((path / FACTS).read_bytes())
    except OSError as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def why_not_whole(path: Path, file: manifest.File) -> str | None:
    """What is wrong with one of a checkpoint's files, or None. Reads all of it."""
    try:
        size = path.stat().st_size
        if file.size not in (None, size):
            return f"{path.name} has {size} bytes, {file.size} were written"
        return None if streamed.hash_of(path) == file.sha256 else f"{path.name} does not match the hash in {FACTS}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{type(error).__name__}: {error}"


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


def write(path: Path, position: Position, saved: parts.StateParts, memory: Any) -> None:
    """Writes one checkpoint folder of one process: aside, flushed to the disk, then renamed.

    Args:
        path: the folder.
        position: how far the run has come.
        saved: the state. Its list is emptied.
        memory: plain values and arrays in lists, tuples and dicts.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path) as aside:
        aside.mkdir()
        facts, more = manifest.facts_of(position, memory, saved)
        saved.own.extend(more)
        written = streamed.write(aside / STATE, saved.own)
        (aside / FACTS).write_bytes(manifest.text_of(facts, {STATE: written}))


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
            shutil.rmtree(path.with_name(path.name + ASIDE), ignore_errors=True)
            aside = atomic.rename(path, path.name + ASIDE)
            _log.warning("%s is damaged, or from another run. It was renamed to %s.", path, aside.name)
    for path in found(directory)[keep:]:
        if place_of(path) != (best, 0):
            _remove(path)


def sweep(directory: Path) -> None:
    """Removes what a killed process left half written; restores what it was about to replace."""
    for old in directory.glob(f".epoch-*{atomic.OLD}"):
        path = old.with_name(old.name.split(".")[1])
        if not path.exists():
            atomic.rename(old, path.name)
    for path in directory.glob(".epoch-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Renames a checkpoint, then deletes it: a half-deleted one must not appear among the others."""
    gone = f".{path.name}.{os.getpid()}{_GONE}"
    with contextlib.suppress(OSError):
        atomic.rename(path, gone)
    shutil.rmtree(path.with_name(gone), ignore_errors=True)
