"""Measures TCP connections between workers, and compares their clocks."""

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

from tfgpu.cluster import Cluster
from tfgpu.errors import MachineError
from tfgpu.rendezvous import clocks

BYTES = 64 * 2**20
_BLOCK = 2**18
_WAIT_S = 60.0
_ASKED = 5
_TIME = struct.Struct("!d")
_HELLO = struct.Struct("!I")


def measured(cluster: Cluster) -> dict:
    """Each other worker in turn sends to the first one, which also compares the clocks.

    Args:
        cluster: the workers; the connections use the first one's port before TensorFlow starts.

    Returns:
        On the first worker, `tcp`: bytes per second by worker, and `clocks`: seconds ahead and the error. Otherwise
        empty.

    Raises:
        MachineError: a worker did not connect, or its connection broke.
    """
    host, _, port = cluster.workers[0].rpartition(":")
    try:
        if cluster.rank:
            _send(host.strip("[]"), int(port), cluster.rank)
            return {}
        return _receive(int(port), cluster.workers)
    except OSError as error:
        raise MachineError(f"The TCP connection to {cluster.workers[0]} broke: {error}. Check the network.") from None


def _receive(port: int, workers: Sequence[str]) -> dict:
    found: dict = {"tcp": {}, "clocks": {}}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", port), backlog=len(workers)))
        listener.settimeout(_WAIT_S)
        guests = {}
        while len(guests) < len(workers) - 1:
            guest = stack.enter_context(listener.accept()[0])
            guest.settimeout(_WAIT_S)
            guests[_HELLO.unpack(_all(guest, _HELLO.size))[0]] = guest
        for rank, guest in sorted(guests.items()):
            comparison = clocks.Comparison()
            for _ in range(_ASKED):
                sent_s, since_s = time.time(), time.monotonic()
                guest.sendall(b"t")
                told = _TIME.unpack(_all(guest, _TIME.size))[0]
                comparison.note(0, {"clock": told}, sent_s=sent_s, took_s=time.monotonic() - since_s)
            clock = comparison.named(["it"])["it"]
            found["clocks"][f"worker {rank}"] = [clock.ahead_s, clock.within_s]
            found["tcp"][f"worker {rank}"] = _rate(guest)
        for guest in guests.values():
            guest.sendall(b"e")
        for guest in guests.values():
            guest.recv(1)  # The guests close first, so that no connection remains in TIME_WAIT on this port.
    return found


def _rate(guest: socket.socket) -> float:
    guest.sendall(b"s")
    began, left = time.perf_counter(), BYTES
    while left:
        received = guest.recv(min(left, _BLOCK))
        if not received:
            raise ConnectionError("it was closed")
        left -= len(received)
    return BYTES / (time.perf_counter() - began)


def _send(host: str, port: int, rank: int) -> None:
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_WAIT_S)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    with connection:
        connection.sendall(_HELLO.pack(rank))
        block = bytes(_BLOCK)
        while (word := connection.recv(1)) == b"t" or word == b"s":
            if word == b"t":
                connection.sendall(_TIME.pack(time.time()))
            else:
                for _ in range(BYTES // _BLOCK):
                    connection.sendall(block)


def _all(guest: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = guest.recv(size - len(found))
        if not part:
            raise ConnectionError("it was closed")
        found += part
    return found
