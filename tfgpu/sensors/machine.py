"""Repeated measurements of this process, its children and the machine, by psutil and the kernel's files."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tfgpu.sensors.gpus import Gpus
from tfgpu.sensors.sample import Sample


def cpu_quota(root: Path) -> float | None:
    """The CPU quota of this process's control group in cores; `None` without a limit."""
    for path in _groups(root, "cpu"):
        words = text_of(path / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        quota, period = text_of(path / "cpu.cfs_quota_us").strip(), text_of(path / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


def memory_limit(root: Path) -> int | None:
    """The memory limit of this process's control group in bytes; `None` without a limit."""
    limit, _ = _limited(root)
    return limit


def memory_used(root: Path) -> int | None:
    """The memory use of the limited control group in bytes, without reclaimable cache; `None` without a limit."""
    _, file = _limited(root)
    if file is None or not (now := text_of(file).strip()).isdecimal():
        return None
    lines = [line.split() for line in text_of(file.parent / "memory.stat").splitlines()]
    kept = dict(words for words in lines if len(words) == 2)
    return max(0, int(now) - int(kept.get("inactive_file", kept.get("total_inactive_file", 0))))


def _limited(root: Path) -> tuple[int | None, Path | None]:
    """The nearest group's limit, and the file with its use."""
    for path in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = text_of(path / limit).strip()
            if text.isdecimal() and int(text) < 2**60:  # Version 1 writes nearly 2**63 for no limit.
                return int(text), path / used
    return None, None


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and its parents, the nearest first."""
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = top / path.strip().lstrip("/")
        found += [each for each in (own, *own.parents) if each == top or top in each.parents]
    return found


def text_of(path: Path) -> str:
    """The content of a file, such as one in `/proc`; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


_CHILDREN_EVERY_S = 10.0
"""How often to search for children, which scans all processes of the machine."""
_CARD = "interface "
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


class Machine:
    """Reads CPU, memory, disks and network; what cannot be read is `None`.

    Args:
        pid: the root of the process tree to watch; `None` means this process.
        root: the folder that holds `proc` and `sys`, for control groups.
    """

    def __init__(self, *, pid: int | None = None, root: str | Path = "/"):
        self._own = psutil.Process(pid)
        self._root = Path(root)
        self._children: dict[int, psutil.Process] = {}
        self._looked_s: float | None = None
        self._cpu_s: dict[int, float] = {}
        self._used_s = 0.0  # by the whole tree so far, including processes that have ended
        self._before: dict[str, float] = {}
        self.cores = cores(self._root)

    def read(self, seconds: float) -> dict[str, Any]:
        """The machine's fields of `Sample`.

        Args:
            seconds: by a monotonic clock.
        """
        resident = self._tree(seconds)
        counts = {"cpu_cores": self._used_s, **_machine_counts()}
        then = self._before.get("seconds")
        passed = seconds - then if then is not None else 0.0
        known = [name for name in counts if passed > 0 and name in self._before]
        rates = {name: max(0.0, counts[name] - self._before[name]) / passed for name in known}
        self._before = {**counts, "seconds": seconds}
        busy, idle = rates.pop("busy", 0.0), rates.pop("idle", 0.0)
        cards = {name: rates.pop(name) for name in [*rates] if name.startswith(_CARD)}
        memory = psutil.virtual_memory()
        return {
            "cores": self.cores,
            **rates,
            "cpu_share": min(1.0, rates["cpu_cores"] / self.cores) if "cpu_cores" in rates else None,
            "machine_cpu_share": busy / (busy + idle) if busy + idle else None,
            "network_share": _network_share(cards),
            "memory_bytes": resident,
            "machine_memory_bytes": memory.total - memory.available,
            "machine_memory_total_bytes": memory.total,
            "memory_limit_bytes": memory_limit(self._root),
            "group_memory_bytes": memory_used(self._root),
        }

    def _tree(self, seconds: float) -> int:
        """Adds up the CPU time of the tree; returns its resident bytes."""
        if self._looked_s is None or seconds - self._looked_s >= _CHILDREN_EVERY_S:
            self._looked_s = seconds
            with contextlib.suppress(*_GONE):
                self._children = {each.pid: each for each in self._own.children(recursive=True)}
        resident = 0
        for each in (self._own, *self._children.values()):
            with contextlib.suppress(*_GONE):
                with each.oneshot():
                    times = each.cpu_times()
                    resident += each.memory_info().rss
                now = times.user + times.system
                self._used_s += max(0.0, now - self._cpu_s.get(each.pid, now))
                self._cpu_s[each.pid] = now
        return resident


def cores(root: Path = Path("/")) -> float:
    """The number of cores that this process may use: its affinity, or its control group's quota if that is less.

    Example:
        >>> cores() > 0
        True
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return min(float(own), quota) if quota else float(own)


def _machine_counts() -> dict[str, float]:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # `user` and `nice` already include the guests' time.
    found = {"idle": idle, "busy": sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)}
    with contextlib.suppress(OSError, RuntimeError):  # A container may hide the disks.
        if disks := psutil.disk_io_counters():
            found |= {"disk_read_bytes_per_s": disks.read_bytes, "disk_written_bytes_per_s": disks.write_bytes}
    with contextlib.suppress(OSError):
        cards = {name: each for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        found["network_sent_bytes_per_s"] = sum(each.bytes_sent for each in cards.values())
        found["network_received_bytes_per_s"] = sum(each.bytes_recv for each in cards.values())
        # The two directions have separate capacity.
        found |= {f"{_CARD}{name} sent": each.bytes_sent for name, each in cards.items()}
        found |= {f"{_CARD}{name} received": each.bytes_recv for name, each in cards.items()}
    return found


def _network_share(rates: dict[str, float]) -> float | None:
    """The busiest interface's rate in one direction as a share of its speed; virtual ones may report no speed."""
    with contextlib.suppress(OSError):
        speeds = {name: each.speed * 1e6 / 8 for name, each in psutil.net_if_stats().items() if each.speed > 0}
        cards = {name: name.removeprefix(_CARD).rpartition(" ")[0] for name in rates}
        return max((rates[name] / speeds[card] for name, card in cards.items() if card in speeds), default=None)
    return None


class Sampler:
    """Takes samples; a context manager that shuts down NVML at the end.

    Args:
        everything: all GPUs of the machine, not only those in CUDA_VISIBLE_DEVICES.
        clock: a monotonic clock in seconds.

    Example:
        >>> with Sampler() as sampler:
        ...     sample = sampler.read()
        >>> sample.memory_bytes > 2**20, sample.cores > 0
        (True, True)
    """

    def __init__(self, *, everything: bool = False, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begun = clock()
        self._machine = Machine()
        self.gpus: Gpus = Gpus(everything=everything)

    def read(self) -> Sample:
        """Takes a sample."""
        seconds = self._clock() - self._begun
        gpus = self.gpus.read(seconds)
        machine = self._machine.read(seconds)
        return Sample(time=time.time(), seconds=seconds, **machine, gpus=gpus, gpu_error=self.gpus.error)

    def close(self) -> None:
        """Shuts down NVML."""
        self.gpus.close()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
