"""A side-car evaluator: a process that evaluates each checkpoint of a training that runs elsewhere."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from tfgpu.checkpoint import storage
from tfgpu.checkpoint.fetching import load
from tfgpu.checkpoint.storage import Damaged, Snapshot
from tfgpu.errors import positive

RESULTS = "evaluations.jsonl"

_log = logging.getLogger(__name__)


def evaluate_checkpoints(
    model: keras.Model,
    data: Any,
    directory: str | Path,
    *,
    last_epoch: int | None = None,
    poll_s: float = 1.0,
    patience_s: float = 600.0,
    on_result: Callable[[int, dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Evaluates each new checkpoint that `tfgpu.callbacks.Checkpoint` writes to a directory.

    The training does not wait for the evaluation. Run this as the `evaluator` task of a cluster, where
    `tfgpu.strategy()` uses this machine's own devices, or in any other process that can read the directory. Results are
    appended to `evaluations.jsonl` in that directory, so a restarted evaluator skips what is already there. If
    checkpoints arrive faster than they can be evaluated, only the newest is evaluated. A damaged checkpoint is skipped
    with a warning.

    Args:
        model: the model of the training, built and compiled.
        data: what `model.evaluate` takes as `x`.
        directory: the directory of the checkpoints.
        last_epoch: stop once this epoch (counted from 1) is evaluated; None stops after `patience_s` only.
        poll_s: seconds between two checks of the directory.
        patience_s: stop after this many seconds without a new checkpoint.
        on_result: called with the epoch's number and its results.

    Returns:
        One mapping per evaluation that this process made, in order: its `epoch` and the results.

    Raises:
        InputError: a number is out of range, or the checkpoints belong to another model.

    Example:
        if tfgpu.Cluster.from_environment().task_type == "evaluator":
            tfgpu.asynchronous.evaluate_checkpoints(model, validation, "run/", last_epoch=10)
    """
    positive("poll_s", poll_s)
    positive("patience_s", patience_s)
    results, folder = [], Path(directory)
    for read in _unseen(folder, last_epoch, poll_s, patience_s):
        load(read, model)
        found = model.evaluate(data, verbose=0, return_dict=True)
        epoch, name = read.position.epoch, read.position.directory.name
        row = {"epoch": epoch, **{metric: float(value) for metric, value in found.items()}}
        _append(folder / RESULTS, {"checkpoint": name, **row})
        results.append(row)
        if on_result is not None:
            on_result(epoch, found)
        _log.info("%s: %s", name, ", ".join(f"{metric} {value:.4g}" for metric, value in found.items()))
    return results


def _unseen(folder: Path, last_epoch: int | None, poll_s: float, patience_s: float) -> Iterator[Snapshot]:
    """Yields each new checkpoint without a result; ends with the training."""
    since, damaged = time.monotonic(), set()
    while time.monotonic() - since < patience_s:
        done = _evaluated(folder)
        read = _newest(folder, done, damaged)
        if read is not None:
            yield read
            since = time.monotonic()
        elif last_epoch is not None and max(done.values(), default=0) >= last_epoch:
            return
        else:
            time.sleep(poll_s)


def _newest(folder: Path, done: dict[str, int], damaged: set[tuple]) -> Snapshot | None:
    """Reads the newest undamaged checkpoint; None if it is evaluated already. Adds to `damaged` what it cannot read."""
    for path in storage.found(folder):
        if path.name in done:
            return None
        identity = _identity(path)
        if identity is None or identity in damaged:
            continue
        try:
            return storage.read(path)
        except Damaged as error:
            if _identity(path) == identity:  # else the training has just replaced or removed it
                damaged.add(identity)
                _log.warning("Checkpoint %s is damaged (%s) and is not evaluated.", path, error)
    return None


def _identity(path: Path) -> tuple | None:
    """Tells a checkpoint from a later one of the same name; None if it is gone."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return path.name, facts.st_ino, facts.st_ctime_ns


def _append(path: Path, row: dict[str, Any]) -> None:
    """Appends one line; what a killed process left of its last line stays on a separate line."""
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def _evaluated(folder: Path) -> dict[str, int]:
    """The epochs of the evaluated checkpoints, by their names; lines that are cut short do not count."""
    path, found = folder / RESULTS, {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            found[row["checkpoint"]] = row["epoch"]
        except (ValueError, LookupError, TypeError):
            continue
    return found
