"""Whether TensorFlow's servers of the other processes answer, once all have met: for a chief, and for those it uses."""

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
"""Seconds to wait for a peer that does not answer, where `TFGPU_STARTUP_TIMEOUT` does not say."""
LEFT_AFTER_S = 5.0
"""Seconds without an answer from the chief's port after which those that serve it end."""
STOPPED_AFTER_S = 30.0
"""Seconds after which they end where the chief's port is open, but nobody speaks there."""
_ANSWER_S = 2.0

_log = logging.getLogger(__name__)


def fail_fast() -> None:
    """Lets TensorFlow say that a peer is gone; otherwise gRPC calls it again for ever."""
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def startup_timeout_s() -> float:
    """Seconds to wait for a peer: TensorFlow itself would wait for ever."""
    return rendezvous.timeout_s() or STARTUP_TIMEOUT_S  # 0 is for the preflight


def deadline() -> float:
    """When a peer that is called from now on must have answered, by `time.monotonic`."""
    return time.monotonic() + startup_timeout_s()


def wait_for(name: str, address: str, until: float) -> None:
    """Returns when TensorFlow's server answers at an address.

    Raises:
        MachineError: it did not by then; the message has the name.
    """
    while not serves(address):
        if time.monotonic() > until:
            raise MachineError(
                f"{name} ({address}) did not answer within {startup_timeout_s():g} s: not started, wrong port, or "
                "firewall. Start it, or give it longer by TFGPU_STARTUP_TIMEOUT."
            )
        time.sleep(0.2)


def stay_with(chief: str, me: str, *, is_asked_to_leave: Callable[[], bool] = lambda: False) -> None:
    """Returns when the chief, once seen, is gone or is stopped.

    Args:
        chief: its address.
        me: this process's name, for the log.
        is_asked_to_leave: whether it need not be sure: one look without an answer is then enough.
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
    """Whether anybody takes a connection there."""
    try:
        with _connected(address):
            return True
    except OSError:
        return False


def serves(address: str) -> bool:
    """Whether TensorFlow's own server answers there, and not the meeting before it; a stopped process does not."""
    try:
        with _connected(address) as connection, connection.makefile("rb") as answer:
            return wire.is_grpc(answer.read(wire.FRAME))
    except OSError:
        return False


@contextlib.contextmanager
def hearing_term(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function at SIGTERM, where nobody else has asked to hear of it."""
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave() -> None:
    """Ends this process as one that was asked to leave and loses nothing."""
    sys.exit(Preempted.EXIT_CODE)


def _connected(address: str) -> socket.socket:
    """A connection as `wire.connect` makes one: it leaves its own port free, and is none with itself."""
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
