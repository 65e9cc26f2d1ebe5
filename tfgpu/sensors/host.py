"""Processors, memory, disks and network of a machine, by psutil; within a container, of what that may use."""

import time
from dataclasses import dataclass

import psutil

from tfgpu.sensors import limits


@dataclass(frozen=True)
class Host:
    """A machine at one moment; rates are since the reading before.

    Attributes:
        cores: how many cores this process may use (affinity and container).
        cpu: the part of the machine's processors that was busy, 0 to 1.
        process_cores: how many cores this process and its children kept busy.
        memory_used_bytes, memory_bytes: of the machine, or of the container where that has a limit.
        process_memory_bytes: resident, of this process and its children; shared pages count in each.
        disk_read_bytes_s, disk_write_bytes_s: over all disks; None where the system does not tell.
        network_read_bytes_s, network_write_bytes_s: over all interfaces but loopback.
    """

    cores: float
    cpu: float
    process_cores: float
    memory_used_bytes: int
    memory_bytes: int
    process_memory_bytes: int
    disk_read_bytes_s: float | None
    disk_write_bytes_s: float | None
    network_read_bytes_s: float
    network_write_bytes_s: float


class HostSensor:
    """Reads a machine; the first reading's rates are since the sensor was made.

    Args:
        pid: the process whose share is told; None: this one.

    Example:
        >>> sensor = HostSensor()
        >>> 0 <= sensor.read().cpu <= 1
        True
    """

    def __init__(self, pid: int | None = None):
        self._process = psutil.Process(pid)
        self._cores, self._limit = limits.cores(), limits.memory_limit()
        self._last = self._counted()

    def read(self) -> Host:
        """One reading."""
        before, now = self._last, self._counted()
        self._last = now
        seconds = max(now["time"] - before["time"], 1e-9)
        busy, whole = now["busy"] - before["busy"], now["whole"] - before["whole"]
        rates = {
            name: None if now[name] is None or before[name] is None else max(0.0, (now[name] - before[name]) / seconds)
            for name in ("disk_read", "disk_write", "network_read", "network_write", "cpu_s")
        }
        used, there = self._memory()
        return Host(
            cores=self._cores,
            cpu=min(1.0, max(0.0, busy / whole)) if whole > 0 else 0.0,
            process_cores=rates["cpu_s"] or 0.0,
            memory_used_bytes=used,
            memory_bytes=there,
            process_memory_bytes=sum(self._resident(each) for each in self._family()),
            disk_read_bytes_s=rates["disk_read"],
            disk_write_bytes_s=rates["disk_write"],
            network_read_bytes_s=rates["network_read"] or 0.0,
            network_write_bytes_s=rates["network_write"] or 0.0,
        )

    def _counted(self) -> dict[str, float | None]:
        times = psutil.cpu_times()
        whole = sum(times[: 8 if hasattr(times, "steal") else None])  # guests' time is in the user's
        disks = psutil.disk_io_counters()
        links = {k: v for k, v in (psutil.net_io_counters(pernic=True) or {}).items() if k != "lo"}
        return {
            "time": time.monotonic(),
            "busy": whole - times.idle - getattr(times, "iowait", 0.0),
            "whole": whole,
            "cpu_s": sum(self._seconds(each) for each in self._family()),
            "disk_read": disks.read_bytes if disks else None,
            "disk_write": disks.write_bytes if disks else None,
            "network_read": sum(link.bytes_recv for link in links.values()),
            "network_write": sum(link.bytes_sent for link in links.values()),
        }

    def _memory(self) -> tuple[int, int]:
        machine = psutil.virtual_memory()
        if self._limit is None or self._limit >= machine.total:
            return machine.total - machine.available, machine.total
        return sum(self._resident(each) for each in self._family()), self._limit

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return []

    @staticmethod
    def _seconds(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.Error:  # It has ended meanwhile.
            return 0.0
        return times.user + times.system

    @staticmethod
    def _resident(process: psutil.Process) -> int:
        try:
            return int(process.memory_info().rss)
        except psutil.Error:
            return 0
