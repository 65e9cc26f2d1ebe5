"""The data of `tfgpu top`: the machine now, and the training that writes its samples into a run's folder."""

import contextlib
import dataclasses
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tfgpu.errors import InputError
from tfgpu.sensors import table
from tfgpu.sensors.limits import Limit, limit
from tfgpu.sensors.machine import Sampler
from tfgpu.sensors.sample import Sample, Value

_FILE = re.compile(r"monitor-worker(\d+)\.csv")
_LAST = 10
"""The number of samples to average."""
SILENT_S = 10.0
"""Seconds without a sample after which a worker counts as silent."""


@dataclass(frozen=True)
class Worker:
    """A worker of a training, from the files of its monitor.

    Attributes:
        number: its number.
        now: the mean of its last samples; counts are those of the last sample.
        epoch: its last complete epoch.
        limit: what limits its steps.
        age_s: seconds since its last sample.
    """

    number: int
    now: Mapping[str, Value]
    epoch: Mapping[str, Value]
    limit: Limit
    age_s: float


@dataclass(frozen=True)
class View:
    """The current state of one machine.

    Attributes:
        host: its name.
        sample: a sample; its process values are those of `tfgpu top` itself.
        cpus: the utilization of each CPU, 0 to 1.
        load: the load average of the last minute.
        disk_free_bytes: free space on the disk of the run, or of the working directory.
        processes: the processes on the GPUs: `gpu`, `pid`, `name`, `bytes`.
        workers: the workers of the run whose files this machine sees.
    """

    host: str
    sample: Sample
    cpus: tuple[float, ...] = ()
    load: float | None = None
    disk_free_bytes: int | None = None
    processes: tuple[Mapping[str, Any], ...] = ()
    workers: tuple[Worker, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        return dataclasses.asdict(self)


class Viewer:
    """Creates views of this machine.

    Args:
        run: the folder of a run, or of a `Monitor`; None shows only the machine.
        sampler: samples the machine with all its GPUs.
    """

    def __init__(self, run: Path | None, sampler: Sampler):
        self._run, self._folder = run, None if run is None else folder_of(run)
        self._sampler = sampler
        psutil.cpu_percent(percpu=True)  # Usage is measured since the previous call.
        sampler.read()

    def look(self) -> View:
        """Returns the current view; rates cover the time since the previous one."""
        free = None
        with contextlib.suppress(OSError):  # The run may be moved meanwhile.
            free = psutil.disk_usage(str(self._run or Path())).free
        sample, load = self._sampler.read(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        cpus = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
        processes, told = tuple(self._sampler.gpus.processes()), workers(self._folder) if self._folder else ()
        return View(socket.gethostname(), sample, cpus, load, free, processes, told)


def folder_of(run: Path) -> Path:
    """The folder with the tables of a run: its `monitor/`, or the folder itself.

    Raises:
        InputError: the folder does not exist, or is not a run.
    """
    if not run.is_dir():
        raise InputError(
            f"There is no folder {str(run)!r}. Give a run directory of `tfgpu train`, or a Monitor's folder."
        )
    if (run / "monitor").is_dir() or (run / "config.yaml").exists():
        return run / "monitor"
    if any(_FILE.fullmatch(path.name) for path in run.iterdir()):
        return run
    raise InputError(
        f"{str(run)!r} has no monitoring data. Give a run directory of `tfgpu train`, or the folder of "
        "`tfgpu.callbacks.Monitor`."
    )


def workers(folder: Path, *, now: float | None = None) -> tuple[Worker, ...]:
    """The workers with tables in a folder.

    Args:
        folder: the folder of the tables.
        now: seconds since 1970; None takes the current time.
    """
    now = time.time() if now is None else now
    found = []
    for path in folder.glob("monitor-worker*.csv"):
        if not (match := _FILE.fullmatch(path.name)):
            continue
        rows, ended = [], []
        try:
            rows = table.last(path, _LAST)
            ended = table.last(path.with_name(f"monitor-epochs-worker{match[1]}.csv"), 1)
        except FileNotFoundError:  # No epoch has ended yet.
            pass
        except OSError:
            continue
        if rows:
            found.append(_worker(int(match[1]), rows, ended, now))
    found = [dataclasses.replace(each, limit=limit(each.now, workers=len(found))) for each in found]
    return tuple(sorted(found, key=lambda each: each.number))


def _worker(number: int, rows: list[dict[str, Value]], ended: list[dict[str, Value]], now: float) -> Worker:
    means: dict[str, Value] = dict(rows[-1])
    for name in rows[-1]:
        told = [value for row in rows if isinstance(value := row.get(name), float) and math.isfinite(value)]
        if told and name not in ("time", "seconds", "epoch", "step") and not name.endswith("energy_j"):
            means[name] = sum(told) / len(told)
    moment = rows[-1].get("time")
    age = max(0.0, now - moment) if isinstance(moment, float) else math.inf
    return Worker(number, means, ended[-1] if ended else {}, limit(means), age)
