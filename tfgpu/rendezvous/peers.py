"""Checks whether the TensorFlow servers of other processes answer, after the rendezvous."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfgpu import rendezvous
from tfgpu.errors import MachineError, Preempted
from tfgpu.rendezvous import wire

STARTUP_TIMEOUT_S = 60.0
"""Seconds to wait for a peer, unless `TFGPU_STARTUP_TIMEOUT` is set."""
LEFT_AFTER_S = 5.0
"""Processes that serve the chief end after this many seconds without a connection to its port."""
STOPPED_AFTER_S = 30.0
"""They end after this many seconds if the chief's port is open, but its server does not answer."""
_ANSWER_S = 2.0

_log = logging.getLogger(__name__)


def fail_fast() -> None:
    """Makes gRPC report lost peers; otherwise it retries forever."""
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def startup_timeout_s() -> float:
    """Seconds to wait for a peer; TensorFlow itself would wait forever."""
    return rendezvous.timeout_s() or STARTUP_TIMEOUT_S  # 0 only skips the rendezvous


def deadline() -> float:
    """The time by which a peer must answer, by `time.monotonic`."""
    return time.monotonic() + startup_timeout_s()


def wait_for(name: str, address: str, until: float) -> None:
    """Waits until TensorFlow's server answers at an address.

    Raises:
        MachineError: it did not answer in time.
    """
    while not serves(address):
        if time.monotonic() > until:
            raise MachineError(
                f"{name} ({address}) did not answer within {startup_timeout_s():g} s: not started, wrong port, or "
                "firewall. Start it, or increase TFGPU_STARTUP_TIMEOUT."
            )
        time.sleep(0.2)


def stay_with(chief: str, me: str, *, is_asked_to_leave: Callable[[], bool] = lambda: False) -> None:
    """Waits for the chief, and returns when it is gone or stopped.

    Args:
        chief: its address.
        me: this process's name, for the log.
        is_asked_to_leave: whether this process is asked to end; then one failed connection is enough.
    """
    wait_for("the chief", chief, deadline())
    answered = spoke = time.monotonic()
    while True:
        time.sleep(1.0)
        if serves(chief):
            answered = spoke = time.monotonic()
        elif not answers(chief):
            if is_asked_to_leave() or time.monotonic() - answered > LEFT_AFTER_S:
                break
        else:
            answered = time.monotonic()
            if time.monotonic() - spoke > STOPPED_AFTER_S:
                break
    _log.info("%s: the chief (%s) is gone; leaving.", me, chief)


def answers(address: str) -> bool:
    """Whether anything accepts connections at an address."""
    try:
        with _connected(address):
            return True
    except OSError:
        return False


def serves(address: str) -> bool:
    """Whether TensorFlow's server answers at an address (not the rendezvous before it, nor a stopped process)."""
    try:
        with _connected(address) as connection, connection.makefile("rb") as answer:
            return wire.is_grpc(answer.read(wire.FRAME))
    except OSError:
        return False


@contextlib.contextmanager
def hearing_term(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function on SIGTERM, unless another handler is installed."""
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave() -> None:
    """Ends this process with the exit code for preemption."""
    sys.exit(Preempted.EXIT_CODE)


def _connected(address: str) -> socket.socket:
    """Connects as `wire.connect` does: leaves the local port free, and rejects a connection to itself."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        near = socket.socket(family, kind, protocol)
        try:
            near.settimeout(_ANSWER_S)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            near.connect(place)
            if near.getsockname() == near.getpeername():
                raise ConnectionRefusedError("nobody listens there")
            return near
        except OSError:
            near.close()
            if place is found[-1][4]:
                raise
    raise OSError(f"{host} has no address")
