"""Messages between the launcher and a node's supervisor: one line of JSON each, optionally followed by raw bytes."""

import json
from collections.abc import Iterator
from typing import Any

MARK = b"tfgpu-node 1"
"""The supervisor's first line. A login shell may write other lines before it."""


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
