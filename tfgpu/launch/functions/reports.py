"""Reports from a worker to the program that launched it, sent during training."""

import json
import os
from typing import Any

from tfgpu.cluster import Cluster

REPORTS = "TFGPU_REPORTS"
"""Holds the file descriptor to which reports are written, one JSON object per line."""


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
