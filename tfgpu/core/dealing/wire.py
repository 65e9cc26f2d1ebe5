"""What travels between two workers: who they are, proven by a key that the cluster shares; then frames.

A frame is a line of JSON and raw bytes. Nothing of it is code, and no pickle.
"""

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np

HANDSHAKE_S = 5.0
"""Seconds in which a caller must prove that it is a worker."""
_STALLED_S = 60
"""Seconds without progress after which a worker that is sent to counts as lost."""
_HEAD = struct.Struct("!IQ")
_MOST_HEADER = 1 << 24
_NONCE = 32
_HELLO = struct.Struct(f"!I{_NONCE}s{_NONCE}s")


class Stranger(Exception):
    """A caller, or the one who answers, does not know the key."""


def _proof(key: bytes, word: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((word, *parts)), "sha256")


def call(address: tuple[str, int], rank: int, key: bytes) -> socket.socket:
    """Connects to a worker.

    Args:
        address: of the worker that listens.
        rank: this worker's.
        key: the cluster's.

    Raises:
        OSError: it cannot be reached.
        Stranger: another program answers.
    """
    connection = socket.create_connection(address, HANDSHAKE_S)
    try:
        mine, said = secrets.token_bytes(_NONCE), struct.pack("!I", rank)
        connection.sendall(_HELLO.pack(rank, mine, _proof(key, b"hello", said, mine)))
        answer = received(connection, 2 * _NONCE)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(key, b"answer", mine, theirs)):
            raise Stranger
        connection.sendall(_proof(key, b"caller", theirs, mine))
        return _ready(connection)
    except BaseException:
        connection.close()
        raise


def answer(connection: socket.socket, key: bytes) -> int:
    """Lets a caller prove that it is a worker; returns its rank. Strangers get no answer.

    Raises:
        OSError, Stranger: it does not.
    """
    connection.settimeout(HANDSHAKE_S)
    rank, theirs, proof = _HELLO.unpack(received(connection, _HELLO.size))
    if not hmac.compare_digest(proof, _proof(key, b"hello", struct.pack("!I", rank), theirs)):
        raise Stranger
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(key, b"answer", theirs, mine))
    if not hmac.compare_digest(received(connection, _NONCE), _proof(key, b"caller", mine, theirs)):
        raise Stranger
    _ready(connection)
    return rank


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STALLED_S, 0))
    return connection


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes from a socket.

    Raises:
        OSError: the connection has ended.
    """
    found = bytearray(size)
    _fill(connection, memoryview(found))
    return bytes(found)


def _fill(connection: socket.socket, room: memoryview) -> None:
    while len(room):
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("The other end has closed the connection.")
        room = room[count:]


def send(connection: socket.socket, header: dict, blocks: Sequence[memoryview] = ()) -> None:
    """Sends a frame.

    Args:
        connection: to the other worker.
        header: plain values.
        blocks: bytes that follow.
    """
    text = json.dumps(header).encode()
    connection.sendall(_HEAD.pack(len(text), sum(block.nbytes for block in blocks)) + text)
    for block in blocks:
        connection.sendall(block)


def receive(connection: socket.socket) -> tuple[dict, np.ndarray]:
    """The next frame: its header, and its bytes as uint8.

    Raises:
        OSError: the connection has ended.
    """
    length, size = _HEAD.unpack(received(connection, _HEAD.size))
    if length > _MOST_HEADER:
        raise ConnectionAbortedError(f"A header of {length} bytes.")
    header = json.loads(received(connection, length))
    content = np.empty(size, "uint8")
    _fill(connection, memoryview(content))
    return header, content
