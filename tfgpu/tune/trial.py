"""A trial: trains a recipe in a separate process, which reports each epoch and is told whether to continue.

The process is `python -m tfgpu.tune.trial FD`; FD is its end of a socket, over which both sides send JSON. It ends when
the other end is closed, so that a killed study leaves no process running.
"""

import contextlib
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tfgpu.errors import InputError, OutOfMemory

LEFT = 70
"""Exit code of a trial whose study has ended."""
_MOST = 1000  # most characters of an error that the study records; the log has the full text


class Line:
    """The trial's end of the socket.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: Connection):
        self._connection, self._answers = connection, queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        return self._answers.get()

    def _read(self) -> None:
        while True:
            try:
                self._answers.put(json.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                os._exit(LEFT)


def value_of(row: Mapping[str, float], monitor: str) -> float:
    """The value of an epoch to minimize.

    Args:
        row: the logs of the epoch.
        monitor: "val_error" (1 minus the accuracy), or a name in the logs.

    Example:
        >>> value_of({"val_accuracy": 0.75, "val_loss": 0.9}, "val_error")
        0.25
    """
    if monitor == "val_error" and "val_accuracy" in row:
        return 1.0 - float(row["val_accuracy"])
    if monitor.startswith("val_") and not any(name.startswith("val_") for name in row):
        raise InputError(
            f"A trial is judged by {monitor}, but nothing is held back for validation. Use --validation 0.1, "
            "or another monitor (--monitor loss)."
        )
    if monitor == "val_error":
        raise InputError(
            "The logs do not contain 'val_accuracy', from which val_error is computed. Use another monitor "
            f"(--monitor val_loss). They contain: {', '.join(sorted(row))}."
        )
    if monitor not in row:
        raise InputError(f"The logs do not contain {monitor!r}. They contain: {', '.join(sorted(row))}.")
    return float(row[monitor])


def last_of(rows: Sequence[Mapping[str, float]], what: Any, monitor: str) -> Mapping[str, float]:
    """The epoch of a run's final weights: the last, or the best if the recipe restores it.

    Args:
        rows: the logs of the epochs.
        what: the recipe.
        monitor: what the study minimizes.
    """
    from tfgpu.recipes import agreement

    stopping = agreement.early_stopping(what)
    if stopping is None or not stopping.restore_best:
        return rows[-1]
    counted = rows[stopping.start_epoch - 1 :] or rows[-1:]
    return (max if stopping.direction == "max" else min)(counted, key=lambda row: row[stopping.monitor])


def serve(number: int, work: Callable[[Mapping[str, Any], Line], Mapping[str, Any]]) -> None:
    """Runs one task received over the socket, and sends its result or its failure.

    Args:
        number: the file descriptor of the socket.
        work: computes the last message, which has the key "end", from the task.
    """
    line = Line(Connection(number))
    task = line.receive()
    try:
        message = work(task, line)
    except Exception as error:
        traceback.print_exc()
        message = _failure(error)
    with contextlib.suppress(OSError):  # Flush before the last message, which ends the process.
        sys.stdout.flush()
    line.send(message)


def _run(task: Mapping[str, Any], line: Line) -> dict[str, Any]:
    import keras

    from tfgpu.recipes import recipe, runner
    from tfgpu.recipes.watch import Diverged

    what, monitor = recipe.make(task["recipe"]), task["monitor"]
    pruned = []

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            value = value_of(logs or {}, monitor)
            if not math.isfinite(value):
                raise Diverged(f"{monitor} became {value} in epoch {epoch + 1}.")
            line.send({"epoch": epoch + 1, "value": value})
            if line.receive()["prune"]:
                pruned.append(epoch + 1)
                self.model.stop_training = True

    result = runner.run(what, output=task["folder"], resume=task["resume"], callbacks=[Tell()])
    if pruned:
        return {"end": "pruned", "reason": f"worse than the others after epoch {pruned[-1]}"}
    row = last_of(result.history, what, monitor)
    return {
        "end": "complete",
        "value": value_of(row, monitor),
        "val_loss": float(row["val_loss"]) if "val_loss" in row else None,
        "test_accuracy": result.accuracy,
    }


def _failure(error: Exception) -> dict[str, Any]:
    import tensorflow as tf

    from tfgpu.recipes.watch import Diverged

    reason = _telling(str(error))[:_MOST] or type(error).__name__
    causes = (error, error.__cause__)
    end = "failed"
    if isinstance(error, Diverged):
        end = "diverged"
    elif any(isinstance(one, OutOfMemory | tf.errors.ResourceExhaustedError | MemoryError) for one in causes):
        end = "out of memory"
    return {"end": end, "reason": reason, "input": isinstance(error, InputError)}


def _telling(text: str) -> str:
    """The informative line of an error: TensorFlow's errors begin with the location.

    Example:
        >>> _telling("Graph execution error:\\n\\nDetected at node a/b defined at (most recent call last):\\nNo room.")
        'No room.'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        where = ("Graph execution error", "Detected at node", 'File "', "<stack traces", "[[", "Stack trace for op")
        lines = [line for line in lines if not line.startswith(where)] or lines
    return lines[0] if lines else ""


if __name__ == "__main__":
    serve(int(sys.argv[1]), _run)
