"""Measures the rates of disk writes and reads, and of tf.data reading records."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tfgpu.errors import MachineError
from tfgpu.measure import rates

BYTES = 128 * 2**20
_RECORD = 128 * 2**10
_REPEATS = 3


def _disk(*, folder: str, **_) -> dict:
    """Writes records, and reads them from disk: as bytes, and with tf.data."""
    import tensorflow as tf

    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < 4 * BYTES:
        raise MachineError(f"{folder} has less than {4 * BYTES >> 20} MiB free. Free some, or use another folder.")
    with tempfile.TemporaryDirectory(prefix=".tfgpu-doctor-", dir=folder) as own:
        path = Path(own) / "records"
        began = time.perf_counter()
        with tf.io.TFRecordWriter(str(path)) as writer:
            record = os.urandom(_RECORD)
            for _ in range(BYTES // _RECORD):
                writer.write(record)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        written = path.stat().st_size / (time.perf_counter() - began)
        measured = rates.alternate({"read": _plain(path), "input": _records(tf, path)}, repeats=_REPEATS)
    return {"folder": folder, "write": written, **{name: asdict(rate) for name, rate in measured.items()}}


def _plain(path: Path) -> Callable[[], float]:
    def measure() -> float:
        _forget(path)
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(2**20):
                pass
        return path.stat().st_size / (time.perf_counter() - began)

    return measure


def _records(tf: object, path: Path) -> Callable[[], float]:
    data = tf.data.TFRecordDataset(str(path), buffer_size=2**20)
    data = data.map(lambda record: tf.io.decode_raw(record, tf.uint8), num_parallel_calls=tf.data.AUTOTUNE)
    data = data.batch(16).prefetch(2)

    def measure() -> float:
        _forget(path)
        began = time.perf_counter()
        for _ in data:
            pass
        return path.stat().st_size / (time.perf_counter() - began)

    return measure


def _forget(path: Path) -> None:
    """Drops the file from the page cache; has no effect on file systems in memory."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


QUESTIONS = {"disk": _disk}
