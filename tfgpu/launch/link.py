"""The launcher's end of the connection to the supervisor of a node, and the messages between them.

A message is one line of JSON, optionally followed by raw bytes.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MARK = b"tfgpu-node 1"
"""The supervisor's first line. A login shell may write other lines before it."""
_CHUNK = 2**16
_KEPT_LINES = 20


def encode(message: dict[str, Any], data: bytes = b"") -> bytes:
    """Encodes a message, followed by `data`."""
    if data:
        message = {**message, "bytes": len(data)}
    return json.dumps(message).encode() + b"\n" + data


class Reader:
    """Reassembles messages from the pieces that arrive.

    Args:
        marked: whether the messages begin after the line `MARK`.

    Example:
        >>> reader = Reader(marked=False)
        >>> list(reader.feed(encode({"a": 1}, b"xyz")[:-1])), list(reader.feed(b"z"))
        ([], [({'a': 1, 'bytes': 3}, b'xyz')])
    """

    def __init__(self, *, marked: bool):
        self.before: list[str] = []
        self.begun = not marked
        self._buffer = bytearray()
        self._header: dict[str, Any] | None = None

    def feed(self, piece: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Takes a piece, and yields the messages that it completes."""
        self._buffer += piece
        while True:
            if self._header is None:
                line = self._line()
                if line is None:
                    return
                if not self.begun:
                    self.begun = line == MARK
                    self.before += [] if self.begun else [line.decode(errors="replace")]
                    continue
                self._header = json.loads(line)
            size = self._header.get("bytes", 0)
            if len(self._buffer) < size:
                return
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            message, self._header = self._header, None
            yield message, data

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class Link:
    """A supervisor that the launcher has started, here or through ssh.

    Args:
        node: the node's name as the user gave it; `""` for this machine.
        command: starts the supervisor, which exchanges messages over standard input and output.
        pings: whether to send pings, because the connection may be lost without an error.
        environment: environment variables of the supervisor; None: this process's own.

    Attributes:
        loss_code: the exit code of an attempt whose connection is lost.
        hint: what to try if no connection can be made.
    """

    loss_code = 1

    def __init__(
        self, node: str, command: Sequence[str], *, pings: bool = False, environment: Mapping[str, str] | None = None
    ):
        self.node, self.pings = node, pings
        self.hint = f" Check that `ssh {node} true` works without a prompt." if node else ""
        self.ended = False
        self.facts: dict[str, Any] | None = None
        self.ports: list[int] | None = None
        self.words: list[str] = []
        self._reader = Reader(marked=True)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # In a session of its own: Ctrl-C is for the launcher only, which tells the others.
        self._process = subprocess.Popen(command, env=environment, bufsize=0, start_new_session=True, **pipes)
        self.messages, self.complaints = self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, do: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # The end of its messages reveals a lost supervisor.
            self._process.stdin.write(encode({"do": do, **facts}))

    def receive(self) -> list[tuple[dict[str, Any], bytes]] | None:
        """Reads the messages that have arrived; None: the connection has ended."""
        piece = os.read(self.messages, _CHUNK)
        return list(self._reader.feed(piece)) if piece else None

    def complain(self) -> list[str] | None:
        """Reads the lines that have arrived on standard error, and keeps the last; None: it has ended."""
        piece = os.read(self.complaints, _CHUNK)
        if not piece:
            return None
        lines = piece.decode(errors="replace").splitlines()
        self.words = (self.words + lines)[-_KEPT_LINES:]
        return lines

    def last_words(self, patience_s: float = 2.0) -> list[str]:
        """The last lines on standard error before the connection ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        os.set_blocking(self.complaints, False)
        with contextlib.suppress(OSError):
            while self.complain() is not None:
                pass
        return [line.strip() for line in self.words if line.strip()]

    @property
    def begun(self) -> bool:
        """Whether the supervisor has ever answered."""
        return self._reader.begun

    def close(self, patience_s: float = 5.0) -> int:
        """Closes the connection, which ends the supervisor; returns the exit code of the supervisor or of ssh."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
