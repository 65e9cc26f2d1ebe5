"""The CPUs and GPUs of this machine, without TensorFlow, and free TCP ports for processes that open them seconds later.

A port that the kernel chooses (`bind` to 0) comes from its ephemeral range, which also serves outgoing connections: it
may be taken before TensorFlow, which needs seconds to start, listens on it. The ports here are outside that range. A
UDP socket with the same number reserves each among launches without blocking TensorFlow. Every attempt gets fresh
ports, so a port that another server takes anyway costs one restart.
"""

import random
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tfgpu.errors import MachineError
from tfgpu.sensors.machine import cores

_FIRST, _LAST = 10000, 29999
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GPU = re.compile(r"GPU (?P<number>\d+): .*?(\(UUID: (?P<uuid>GPU-[^)\s]+)\))?$")


def cpus() -> int:
    """Counts the CPUs that this process may use, by its affinity and its container's quota."""
    return max(1, int(cores()))


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Lists the GPUs as CUDA_VISIBLE_DEVICES names them; by UUID where it is not set.

    CUDA's numbers may differ from the driver's, and a lost GPU has a number but cannot be used.

    Args:
        environ: if it has CUDA_VISIBLE_DEVICES, its entries up to the first invalid one are used, as in CUDA.

    Example:
        >>> gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-8f2a,-1,3"})
        ['2', 'GPU-8f2a']
    """
    outer = environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return _installed()
    names = []
    for name in (part.strip() for part in outer.split(",")):
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def _installed() -> list[str]:
    """The GPUs that answer, by UUID; by number if one has MIG slices, of which CUDA takes one by number."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [_GPU.match(line.rstrip()) for line in done.stdout.splitlines()]
    found = [(line["number"], line["uuid"]) for line in lines if line]
    is_cut = re.search(r"(?m)^\s+MIG ", done.stdout)
    return [number if is_cut or not uuid else uuid for number, uuid in found]


class Ports:
    """Ports that stay reserved among launches until `close`.

    Args:
        count: how many.

    Raises:
        MachineError: this machine has too few free ports.

    Example:
        >>> with Ports(2) as ports:
        ...     len(set(ports.numbers))
        2
    """

    def __init__(self, count: int):
        self.numbers: list[int] = []
        self._marks: list[socket.socket] = []
        candidates = _candidates()
        random.Random().shuffle(candidates)
        for number in candidates:
            if len(self.numbers) == count:
                return
            mark = _mark(number)
            if mark:
                self._marks.append(mark)
                self.numbers.append(number)
        if len(self.numbers) < count:
            self.close()
            raise MachineError(f"This machine does not have {count} free TCP ports from {_FIRST} on. Free some.")

    def close(self) -> None:
        for mark in self._marks:
            mark.close()

    def __enter__(self) -> "Ports":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _candidates() -> list[int]:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    outside = [port for port in range(_FIRST, _LAST + 1) if not low <= port <= high]
    # Nearly all ports are ephemeral, so no better ones exist.
    return outside or list(range(_FIRST, 65536))


def _mark(number: int) -> socket.socket | None:
    """Returns the UDP socket that reserves a port, or None where the port is in use."""
    mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        mark.bind(("", number))
        with socket.socket() as trial:
            # Servers bind this way: a port whose last connections are in TIME_WAIT counts as free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", number))
    except OSError:
        mark.close()
        return None
    return mark
