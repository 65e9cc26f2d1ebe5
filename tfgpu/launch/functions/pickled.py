"""A Python function as a worker's script: cloudpickle carries it there, and its result back."""

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfgpu import atomic
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, required
from tfgpu.launch.restarts import WRONG_INPUT

REPORTS = "TFGPU_REPORTS"
"""Holds the file descriptor to which reports are written, one JSON object per line."""
CALL, RESULT, DATA = "call.pickle", "result.pickle", "data.pickle"
SCRIPT = """from tfgpu.launch.functions import pickled

pickled.main(__file__)
"""


def pack(function: Callable, arguments: Sequence) -> bytes:
    """Pickles a call, to be run in another process.

    Args:
        function: any function; the code of nested functions and of those in `__main__` is included.
        arguments: what it is called with.

    Raises:
        InputError: cloudpickle is not installed, or it cannot pack something that the function uses.
    """
    cloudpickle = _cloudpickle()
    try:
        return cloudpickle.dumps((function, tuple(arguments)))
    except Exception as error:  # whatever a user class's __reduce__ raises
        name = getattr(function, "__name__", function)
        raise InputError(
            f"The function {name!r} cannot be sent to the workers: {error}. Create what it needs (a session, an open "
            "file, a lock, a strategy) inside it, or pass the path of a script."
        ) from error


def write(folder: Path, call: bytes, data: object = None) -> Path:
    """Writes a script to `folder` that makes the call, with `data` as the first argument unless it is None."""
    (folder / CALL).write_bytes(call)
    if data is not None:
        (folder / DATA).write_bytes(pickle.dumps(data))
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def main(script: str) -> None:
    """Makes the call that is pickled next to `script`, and writes its result there.

    Exits with code 2 if the function raises an `InputError`, which no restart can fix.
    """
    folder = Path(script).parent
    function, arguments = pickle.loads((folder / CALL).read_bytes())
    if (folder / DATA).exists():
        arguments = (pickle.loads((folder / DATA).read_bytes()), *arguments)
    try:
        result = _packed(function(*arguments))
    except InputError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    atomic.write_bytes(folder / RESULT, result)


def _packed(result) -> bytes:
    try:
        return _cloudpickle().dumps(result)
    except Exception as error:
        raise InputError(
            f"The function's return value cannot be sent back: {error}. Received: {type(result).__name__}. "
            "Return plain values or NumPy arrays, such as `model.get_weights()` or `history.history`."
        ) from error


def _cloudpickle():
    install = "`pip install 'tfgpu[ray]'` or `pip install 'tfgpu[spark]'`"
    fix = f"Run {install}, here and on the workers; or pass the path of a script."
    return required("cloudpickle", "Functions are sent with cloudpickle", fix)


def report(values: dict[str, Any]) -> None:
    """Sends values to the `on_progress` of the program that launched this worker; does nothing anywhere else.

    Only the chief's reports are delivered, so every worker can run the same code. In `model.fit`,
    `tfgpu.callbacks.Report()` calls it at each epoch's end.

    Args:
        values: numbers, strings and lists by name.

    Example:
        >>> report({"epoch": 0, "loss": 0.25})
    """
    pipe = os.environ.get(REPORTS)
    if pipe is None or not Cluster.from_environment().is_chief:
        return
    line = json.dumps(values, default=_plain) + "\n"
    with open(int(pipe), "w", closefd=False) as file:
        file.write(line)


def _plain(value):
    """Converts NumPy's and TensorFlow's numbers and arrays for JSON."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.tolist() if hasattr(value, "tolist") else str(value)
