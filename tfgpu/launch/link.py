"""The launcher's end of the connection to the supervisor of a node."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tfgpu.launch import frames

_CHUNK = 2**16
_KEPT_LINES = 20


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
        self._reader = frames.Reader(marked=True)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the launcher only, which tells the others.
        )
        self.messages, self.complaints = self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, do: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # The end of its messages reveals a lost supervisor.
            self._process.stdin.write(frames.encode({"do": do, **facts}))

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
