"""A side-car evaluator: a process beside the training that evaluates each of its checkpoints, once."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from tfgpu.checkpoint import storage
from tfgpu.checkpoint.callback import Checkpoint
from tfgpu.errors import InputError

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
    """Follows a folder of `tfgpu.callbacks.Checkpoint` and evaluates each new checkpoint.

    The training does not wait for it. It is meant for the task `evaluator` of a cluster, where `tfgpu.strategy()`
    gives the strategy of the machine's own devices; any other process that sees the folder does as well. What it has
    evaluated stands in `evaluations.jsonl` there, so one that is started again does nothing twice. Where checkpoints
    come faster than they can be evaluated, only the newest one is taken.

    Args:
        model: the compiled model of the training, built.
        data: what `model.evaluate` takes as `x`.
        directory: the checkpoints' folder.
        last_epoch: the number of the epoch, counted from 1, after which the training ends; None waits `patience_s`.
        poll_s: seconds between two looks.
        patience_s: seconds without a new checkpoint after which it ends.
        on_result: called with the epoch's number and its results.

    Returns:
        The results of this process's evaluations, in order, each with its `epoch`.

    Raises:
        InputError: a number is out of range, or the checkpoints belong to another model.

    Example:
        if tfgpu.Cluster.from_environment().task_type == "evaluator":
            tfgpu.asynchronous.evaluate_checkpoints(model, validation, "run/", last_epoch=10)
    """
    for name, value in (("poll_s", poll_s), ("patience_s", patience_s)):
        if not value > 0:
            raise InputError(f"`{name}` must be above 0. Received: {value!r}.")
    reader, results, folder = Checkpoint(directory, is_chief=False), [], Path(directory)
    for _ in _news(folder, last_epoch, poll_s, patience_s):
        position = reader.restore(model)
        if position is None:
            continue
        found = model.evaluate(data, verbose=0, return_dict=True)
        row = {"epoch": position.epoch, **{name: float(value) for name, value in found.items()}}
        with open(folder / RESULTS, "a") as file:
            file.write(json.dumps({"checkpoint": position.directory.name, **row}) + "\n")
        results.append(row)
        if on_result is not None:
            on_result(position.epoch, found)
        _log.info("%s: %s", position.directory.name, ", ".join(f"{name} {v:.4g}" for name, v in found.items()))
    return results


def _news(folder: Path, last_epoch: int | None, poll_s: float, patience_s: float) -> Iterator[None]:
    """Yields whenever the newest checkpoint is one that nobody has evaluated; ends with the training."""
    since = time.monotonic()
    while time.monotonic() - since < patience_s:
        done, newest = _evaluated(folder), next(iter(storage.found(folder)), None)
        if newest is not None and newest.name not in done:
            yield
            since = time.monotonic()
        elif last_epoch is not None and max(done.values(), default=0) >= last_epoch:
            return
        else:
            time.sleep(poll_s)


def _evaluated(folder: Path) -> dict[str, int]:
    """The epochs of the checkpoints that are done, by their names; a line that was cut short is not."""
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["checkpoint"]: row["epoch"] for row in rows}
