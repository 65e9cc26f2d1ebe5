"""Rows of numbers as TensorBoard scalars, one event per row."""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from tfgpu.sensors.sample import Value

_NO_CURVES = ("time", "seconds", "epoch", "step")


class EventsTable:
    """Writes samples under `monitor/` by step, and epochs under `monitor_epoch/` by epoch.

    `tf.summary` makes one event per number. One event per sample takes a fraction of a millisecond.

    Args:
        folder: the run's folder; created with the first row.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: BinaryIO | None = None

    def add(self, samples: Iterable[Mapping[str, Value]], epochs: Iterable[Mapping[str, Value]]) -> None:
        """Writes rows.

        Raises:
            OSError: they could not be written.
        """
        events = [_event("monitor", row, "step") for row in samples]
        events += [_event("monitor_epoch", row, "epoch") for row in epochs]
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.monitor"
            self._file = open(self._folder / name, "ab")
            events.insert(0, event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _event(folder: str, row: Mapping[str, Value], step: str) -> event_pb2.Event:
    values = [
        summary_pb2.Summary.Value(tag=f"{folder}/{name}", simple_value=float(value))
        for name, value in row.items()
        if name not in _NO_CURVES and isinstance(value, int | float)
    ]
    moment, at = row.get("time"), row.get(step)
    return event_pb2.Event(
        wall_time=moment if isinstance(moment, float) else time.time(),
        step=int(at) if isinstance(at, int | float) else 0,
        summary=summary_pb2.Summary(value=values),
    )
