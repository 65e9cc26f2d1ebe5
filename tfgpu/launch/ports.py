"""Free TCP ports for processes that open them only seconds later.

A port that the kernel chooses (`bind` to 0) lies in its ephemeral range, from which it also serves every outgoing
connection: it may be taken before TensorFlow, which needs seconds to start, listens on it. These lie outside that
range. A UDP socket of the same number reserves each among launches, without being in TensorFlow's way. Every attempt
gets fresh ports, so that a port which another server takes all the same costs one restart.
"""

import random
import socket
from pathlib import Path

from tfgpu.errors import MachineError

_FIRST, _LAST = 10000, 29999
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
            raise MachineError(f"This machine has no {count} free TCP ports from {_FIRST}. Free some.")

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
    # Where nearly all ports are ephemeral, there is nothing better.
    return outside or list(range(_FIRST, 65536))


def _mark(number: int) -> socket.socket | None:
    """Returns the UDP socket that reserves a port, or None where the port is in use."""
    mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        mark.bind(("", number))
        with socket.socket() as trial:
            # As servers bind: a port whose last connections are in TIME_WAIT counts as free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", number))
    except OSError:
        mark.close()
        return None
    return mark
