"""Sockets between all workers, one for each pair, and what has come over them, sorted by what it is about.

What travels is a frame: a line of JSON and raw bytes. Nothing of it is code, and no pickle. The workers agree on ports
and on a random key, by which they prove who they are, by texts through TensorFlow's coordination service. Each listens
until all others have called.
"""

import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Hashable, Sequence

import numpy as np

from tfgpu.compat import slots
from tfgpu.compat.tensorflow import runtime
from tfgpu.core.workers import ledger
from tfgpu.core.workers.ledger import Ledger
from tfgpu.core.workers.messages import Messages

_MEET_S = 15.0
"""Seconds in which all workers must have called each other."""
HANDSHAKE_S = 5.0
"""Seconds in which a caller must prove that it is a worker."""
_STALLED_S = 60
"""Seconds without progress after which a worker that is sent to counts as lost."""
_HEAD = struct.Struct("!IQ")
_MOST_HEADER = 1 << 24
_NONCE = 32
_HELLO = struct.Struct(f"!I{_NONCE}s{_NONCE}s")


class Inbox:
    """What has come about one thing.

    Attributes:
        changed: notified of each change; its lock guards the rest.
        items: header and bytes of each frame, by the sender's rank and the frame's place.
        took: by rank, the last place of which a worker has said that it took it.
        gone: workers that send no more.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.items: dict[tuple[int, int], tuple[dict, np.ndarray]] = {}
        self.took: dict[int, int] = {}
        self.gone: set[int] = set()

    def put(self, rank: int, header: dict, content: np.ndarray) -> None:
        """Takes a frame."""
        with self.changed:
            if header["kind"] == "took":
                self.took[rank] = header["at"]
            elif header["kind"] == "closed":
                self.gone.add(rank)
            else:
                self.items[rank, header["at"]] = header, content
            self.changed.notify_all()

    def lose(self, rank: int) -> None:
        """Takes note that a worker sends no more."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class Links:
    """This worker's connections to the others.

    Args:
        kept: this worker's part of the ledger.
        connections: by rank.
    """

    def __init__(self, kept: Ledger, connections: dict[int, socket.socket]):
        self.ledger, self.rank, self.workers = kept, kept.rank, len(kept.names)
        self._connections, self._lock = connections, threading.Lock()
        self._sending = {rank: threading.Lock() for rank in connections}
        self._inboxes: dict[Hashable, Inbox] = {}
        self._closed: set[Hashable] = set()
        self._lost: set[int] = set()
        os.register_at_fork(after_in_child=self._leave)  # a child would keep the connections of a dead worker open
        for rank in connections:
            threading.Thread(target=self._receive, args=(rank,), name=f"tfgpu-link-{rank}", daemon=True).start()

    def inbox(self, key: Hashable) -> Inbox:
        """What has come about a thing."""
        with self._lock:
            return self._inbox(key)

    def _inbox(self, key: Hashable) -> Inbox:
        if key not in self._inboxes:
            found = self._inboxes[key] = Inbox()
            found.gone |= self._lost
        return self._inboxes[key]

    def close(self, key: Hashable) -> None:
        """Forgets what came about a thing, and what comes."""
        with self._lock:
            self._closed.add(key)
            self._inboxes.pop(key, None)

    def send(self, rank: int, key: Sequence, kind: str, at: int = 0, blocks: Sequence = (), **facts) -> bool:
        """Sends a frame; returns whether the connection holds.

        Args:
            rank: of the worker that gets it.
            key: what it is about: numbers and texts.
            kind: what it says.
            at: its place.
            blocks: bytes.
            facts: what else it says, plain values.
        """
        header = {"key": list(key), "kind": kind, "at": at, **facts}
        try:
            with self._sending[rank]:
                send(self._connections[rank], header, blocks)
        except OSError:
            self._lose(rank)
            return False
        return True

    def tell(self, key: Sequence, kind: str, at: int = 0, **facts) -> None:
        """Sends a frame without bytes to all others."""
        for rank in self._connections:
            self.send(rank, key, kind, at, **facts)

    def _receive(self, rank: int) -> None:
        try:
            while True:
                header, content = receive(self._connections[rank])
                key = tuple(header.pop("key"))
                with self._lock:
                    found = None if key in self._closed else self._inbox(key)
                if found is not None:
                    found.put(rank, header, content)
        except (OSError, ValueError, KeyError, TypeError):
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        with self._lock:
            self._lost.add(rank)
            inboxes = list(self._inboxes.values())
        for each in inboxes:
            each.lose(rank)

    def _leave(self) -> None:
        for connection in self._connections.values():
            os.close(connection.detach())


def all_workers() -> Links | str:
    """The connections of all workers, or why there are none. Every worker must call it; kept for the process."""
    kept = slots.of(runtime())
    if not hasattr(kept, "links"):
        kept.links = _connected()
    return kept.links


def _connected() -> Links | str:
    mine, texts = ledger.current(), Messages("links")
    connections: dict[int, socket.socket] = {}
    try:
        listener, reason = _listener(mine.names[mine.rank]), ""
    except OSError as error:
        listener, reason = None, f"{mine.name} cannot listen ({error})"
    ports = texts.of_all("port", str(0 if listener is None else listener.getsockname()[1]))
    secret = bytes.fromhex(texts.of_all("key", secrets.token_hex(32) if mine.rank == 0 else "00")[0])
    if listener is not None:
        with listener:
            reason = _meet(mine, listener, [int(port) for port in ports], secret, connections)
    reasons = [each for each in texts.of_all("result", reason) if each]
    if not reasons:
        return Links(mine, connections)
    for connection in connections.values():
        connection.close()
    return reasons[0]


def _meet(mine: Ledger, listener: socket.socket, ports: list[int], secret: bytes, connections: dict) -> str:
    """Calls the workers before this one, and waits for those after it; returns what went wrong, or an empty text."""
    later = set(range(mine.rank + 1, len(mine.names)))
    waiting = threading.Thread(target=_accept, args=(listener, secret, later, connections), daemon=True)
    waiting.start()
    failed = ""
    for rank in range(mine.rank):
        host = _host(mine.names[rank])
        try:
            if not ports[rank]:
                raise ConnectionRefusedError("it does not listen")
            connections[rank] = call((host, ports[rank]), mine.rank, secret)
        except (OSError, Stranger) as error:
            failed = f"{mine.name} does not reach port {ports[rank]} of {mine.names[rank]} ({error or 'a stranger'})"
            break
    waiting.join(_MEET_S)
    missing = later - connections.keys()
    if missing and not failed:
        failed = f"{mine.names[min(missing)]} does not reach port {ports[mine.rank]} of {mine.name}"
    return failed


def _accept(listener: socket.socket, secret: bytes, wanted: set[int], connections: dict) -> None:
    """Waits for callers; each proves itself in a thread of its own, so that none blocks the others."""

    def take(connection: socket.socket) -> None:
        try:
            rank = answer(connection, secret)
        except (OSError, Stranger):
            connection.close()
            return
        if rank in wanted and rank not in connections:
            connections[rank] = connection

    listener.settimeout(0.1)
    for _ in range(int(_MEET_S / 0.1)):
        if wanted <= connections.keys():
            return
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        threading.Thread(target=take, args=(connection,), daemon=True).start()


def _host(name: str) -> str:
    """The host in a worker's name, such as `worker 1 (10.0.0.2:5050)`."""
    return name.rpartition(" (")[2].rstrip(")").rpartition(":")[0].strip("[]")


def _listener(name: str) -> socket.socket:
    """Listens where the others know this worker, else on all of its addresses."""
    host = _host(name)
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=64)
    except OSError:
        return socket.create_server(("", 0), backlog=64)


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
