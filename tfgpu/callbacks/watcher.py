"""The thread behind `Monitor`: takes samples, writes them and summarizes epochs."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from tfgpu import atomic
from tfgpu.sensors import Sampler, prometheus
from tfgpu.sensors.epochs import Epoch, Epochs
from tfgpu.sensors.limits import input_wait, limit
from tfgpu.sensors.sample import Sample, Value
from tfgpu.sensors.table import Table

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
        if self._file is not None:
            self._file.close()
            self._file = None


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


_log = logging.getLogger(__name__)

_COST = 100
"""The time between samples is at least this many times a sample's CPU time."""
_HELD = 600
"""The most rows to keep until the first step, before which nothing is written."""
_FINISH_S = 10.0


@dataclass(frozen=True)
class Places:
    """Where the figures are written; `None` means nowhere.

    Attributes:
        samples: the table of samples.
        epochs: the table of epochs.
        prometheus: the text file.
        server: host and port.
        events: TensorBoard's run.
    """

    samples: Path | None = None
    epochs: Path | None = None
    prometheus: Path | None = None
    server: tuple[str, int] | None = None
    events: Path | None = None


class Watcher:
    """Takes samples in a thread from its creation until `finish`; after an error it warns once and continues.

    Nothing is written before the first step: a run that fails earlier leaves no files.

    Args:
        places: where the figures are written.
        begun: when training began, by `time.monotonic`.
        every_s: seconds between samples.
        worker: this process's number.
        workers: number of workers that train together.
        step: steps that the model has already made.
        computing_s: returns how long a step computes, without its wait for data; None if that is unknown.
        epochs: the list to which the epochs' rows are appended.

    Attributes:
        epoch: the number of the current epoch, from 1.
        cost_s: the CPU time that the samples took.
    """

    def __init__(
        self,
        places: Places,
        *,
        begun: float,
        every_s: float,
        worker: int,
        workers: int,
        step: int = 0,
        computing_s: Callable[[], float | None] = lambda: None,
        epochs: list[dict[str, Value]] | None = None,
    ):
        self.epoch = 1
        self.cost_s = 0.0
        self._places, self._every_s, self._workers, self._begun = places, every_s, workers, begun
        self._computing_s, self._rows = computing_s, [] if epochs is None else epochs
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._step, self._timed_steps, self._timed_s = step, 0, 0.0
        self._has_begun = False
        self._ended: list[Epoch] = []
        self._epochs = Epochs(workers=workers)
        self._rows_per_step: float | None = None
        self._samples = Table(places.samples) if places.samples else None
        self._table = Table(places.epochs) if places.epochs else None
        self._events = EventsTable(places.events) if places.events else None
        self._held: list[dict[str, Value]] = []
        self._warned: set[str] = set()
        self._metrics = prometheus.Metrics(worker=worker)
        self._server = prometheus.Server(places.server, self._metrics) if places.server else None
        self._thread = threading.Thread(target=self._work, name="tfgpu-monitor", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int | None:
        """The port that serves Prometheus metrics."""
        return self._server.port if self._server else None

    def note(self, steps: int, seconds: float | None) -> None:
        """Records a block of steps; `seconds` is `None` if its time does not count."""
        with self._lock:
            self._has_begun = True
            self._step += steps
            if seconds is not None:
                self._timed_steps += steps
                self._timed_s += seconds

    def end(self, epoch: Epoch) -> None:
        """Records a finished epoch."""
        with self._lock:
            self._ended.append(epoch)

    def stop(self) -> None:
        """Asks the thread to end after a last sample."""
        self._stop.set()

    def finish(self) -> None:
        """Ends the thread and the server. If a driver hangs, the thread is abandoned."""
        self.stop()
        self._thread.join(timeout=_FINISH_S)
        if self._thread.is_alive():
            _log.warning("The monitor's last sample took more than %.0f s: its last rows are not written.", _FINISH_S)
        if self._server:
            self._server.close()

    def _work(self) -> None:
        following = time.monotonic()
        try:
            with Sampler() as sampler:
                while True:
                    is_last = self._stop.is_set()
                    begun = time.thread_time()
                    self._take(sampler)
                    if is_last:
                        return
                    spent = time.thread_time() - begun
                    self.cost_s += spent
                    following = max(following + max(self._every_s, _COST * spent), time.monotonic())
                    self._stop.wait(following - time.monotonic())
        except Exception:  # The monitor must not stop training.
            self._warn("the monitor has ended", exc_info=True)
        finally:
            if self._events:
                self._try("TensorBoard's events", self._events.close)

    def _take(self, sampler: Sampler) -> None:
        try:
            sample = sampler.read()
        except Exception:
            self._warn("a sample could not be taken", exc_info=True)
            return
        if sample.gpu_error and (sample.gpus or self._has_begun) and "not found" not in sample.gpu_error.lower():
            self._warn(f"GPU figures are missing: {sample.gpu_error}")
        row = self._row(sample)
        with self._lock:
            ended, self._ended = self._ended, []
            has_begun = self._has_begun
        for epoch in ended:
            self._epochs.end(epoch)
            if epoch.examples and epoch.steps:
                self._rows_per_step = epoch.examples / epoch.steps
        rows = self._epochs.add(row)
        self._rows.extend(rows)
        self._held = [*self._held, row][-_HELD:]
        if has_begun:
            held, self._held = self._held, []
            self._write(held, rows, sample)

    def _row(self, sample: Sample) -> dict[str, Value]:
        with self._lock:
            steps, seconds, step = self._timed_steps, self._timed_s, self._step
            self._timed_steps, self._timed_s = 0, 0.0
        step_s = seconds / steps if steps else None
        computing_s = None
        try:
            computing_s = self._computing_s() if step_s else None
        except Exception:
            self._warn("the wait for data could not be read", exc_info=True)
        wait = input_wait(step_s, computing_s, [gpu.utilization for gpu in sample.gpus])
        rate = self._rows_per_step / step_s if self._rows_per_step and step_s else None
        # The epochs' clock starts with `fit`, the sampler's later, in its thread.
        row: dict[str, Value] = {"time": sample.time, "seconds": time.monotonic() - self._begun}
        row |= {"epoch": self.epoch, "step": step, "step_time_s": step_s, "examples_per_s": rate, "input_wait": wait}
        row |= {name: value for name, value in sample.row().items() if name not in row}
        return row | {"gpu_energy_j": sample.gpu_energy_j}

    def _write(self, samples: list[dict[str, Value]], epochs: Iterable[dict[str, Value]], newest: Sample) -> None:
        if table := self._samples:
            self._try(table.path, lambda: [table.append(row) for row in samples])
        if other := self._table:
            self._try(other.path, lambda: [other.append(row) for row in epochs])
        if events := self._events:
            self._try("TensorBoard's events", lambda: events.add(samples, epochs))
        if self._server or self._places.prometheus:
            row = samples[-1]
            limited = {**row, "limit": limit(row, workers=self._workers).resource}
            uuids = {gpu.label: gpu.uuid for gpu in newest.gpus}
            self._metrics.update(limited, uuids=uuids)
        if path := self._places.prometheus:
            self._try(path, lambda: atomic.write_text(path, self._metrics.text()))

    def _try(self, what: object, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._warn(f"{what} cannot be written: {error.strerror or error}")

    def _warn(self, text: str, exc_info: bool = False) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("Monitor: %s. Training continues.", text, exc_info=exc_info)


@contextlib.contextmanager
def watching(path: Path, *, worker: int, workers: int, every_s: float = 1.0) -> Iterator[None]:
    """Monitors a process that does not run `fit`: writes samples to a table during the block.

    Args:
        path: the table; rows are appended to an existing one.
        worker: this process's number.
        workers: number of workers that train together.
        every_s: seconds between samples.
    """
    watcher = Watcher(Places(path), begun=time.monotonic(), every_s=every_s, worker=worker, workers=workers)
    watcher.note(0, None)  # There is no first step to wait for.
    try:
        yield
    finally:
        watcher.finish()
