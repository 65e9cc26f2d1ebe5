"""The output of processes: on the screen with the process's name before each line, and unchanged in a log file."""

import collections
import contextlib
import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tfgpu.errors import InputError

LAST_LINES = 20
"""How many lines of a process are shown again when it fails."""
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = 31
_LONGEST_LINE = 2**16
_BAR_EVERY_S = 1.0
_TAIL_BYTES = 1 << 16


def default_folder(script: str) -> Path:
    """Names a fresh folder for a launch's log files: `tfgpu-logs/<time>-<script>`."""
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{Path(script).stem}"
    folder, count = Path("tfgpu-logs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("tfgpu-logs") / f"{name}-{count}"
    return folder


def tail(path: Path) -> list[str]:
    """The last lines of a log; empty if the file does not exist."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return []


def colored(stream: int, environ: Mapping[str, str]) -> bool:
    """Whether a standard stream gets colors: NO_COLOR forbids them, FORCE_COLOR forces them, else a terminal gets them.

    Source: https://no-color.org, https://force-color.org
    """
    return not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or os.isatty(stream))


class Screen:
    """Shows and logs what processes print.

    Args:
        names: of the processes, such as `"worker 0"`.
        folder: folder of the log files, created if missing; None writes none. Existing files are appended to.
        stderr_only: whether everything goes to stderr, because stdout has another use.

    Raises:
        InputError: the folder cannot be written to.
    """

    def __init__(self, names: Sequence[str], folder: Path | None, *, stderr_only: bool = False):
        self._names, self._stderr_only = list(names), stderr_only
        self._width = max(map(len, [*names, "launch"]))
        self._colors = {stream: colored(stream, os.environ) for stream in (1, 2)}
        self._files = _open_files(names, folder)
        self._paths = [str(folder / _file_name(name)) if folder else None for name in names]
        self._lines = {(id, stream): _Lines() for id in range(len(names)) for stream in (1, 2)}
        self._open: dict[int, int] = {}  # The stream of each process whose line is incomplete.
        self._last = [collections.deque(maxlen=LAST_LINES) for _ in names]

    def path(self, id: int) -> str | None:
        """The log file of a process, or None."""
        return self._paths[id]

    def last(self, id: int) -> list[str]:
        """The last lines of a process, on either stream."""
        return list(self._last[id])

    def begin(self, attempt: int) -> None:
        """Marks in the files where an attempt begins, and discards the last lines of the previous one."""
        for id in range(len(self._names)):
            self._last[id].clear()
            if attempt > 1:
                self._log(id, f"===== attempt {attempt}, {datetime.datetime.now():%Y-%m-%d %H:%M:%S} =====\n".encode())

    def output(self, id: int, stream: int, data: bytes) -> None:
        """Shows and logs a piece of a process's output."""
        # Two streams share a file: neither continues in the middle of the other's line.
        cut = b"\n" if self._open.get(id, stream) != stream else b""
        self._log(id, cut + data)
        self._open[id] = stream
        if data.endswith(b"\n"):
            del self._open[id]
        self._show(id, stream, self._lines[id, stream].feed(data))

    def finish(self, id: int) -> None:
        """Shows the last line of a process that has ended without a newline."""
        for stream in (1, 2):
            self._show(id, stream, self._lines[id, stream].rest())

    def say(self, text: str, *, error: bool = False) -> None:
        """Writes a message of the launcher, to stderr."""
        for line in text.splitlines():
            self._write(2, "launch", _RED if error else 1, line)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _show(self, id: int, stream: int, lines: Sequence[str]) -> None:
        color = _COLORS[id % len(_COLORS)]
        for line in lines:
            self._last[id].append(line)
            self._write(stream, self._names[id], color, line)

    def _write(self, stream: int, name: str, color: int, line: str) -> None:
        prefix = f"{name:<{self._width}}|"
        if self._colors[stream]:
            prefix = f"\033[{color}m{prefix}\033[0m"
        out = sys.stdout if stream == 1 and not self._stderr_only else sys.stderr
        encoding = out.encoding or "utf-8"
        out.write(f"{prefix} {line}\n".encode(encoding, "replace").decode(encoding))
        out.flush()

    def _log(self, id: int, data: bytes) -> None:
        file = self._files.get(id)
        if not file:
            return
        try:
            file.write(data)
        except OSError as error:
            del self._files[id]
            self.say(f"{self._paths[id]} gets no more lines: {error.strerror}. Training continues.", error=True)


class _Lines:
    """Cuts a stream into lines. A progress bar that rewrites its line is shown once a second."""

    def __init__(self):
        self._left = b""
        self._shown_at = 0.0

    def feed(self, data: bytes) -> list[str]:
        *whole, self._left = (self._left + data).split(b"\n")
        lines = [_visible(line) for line in whole]
        now = time.monotonic()
        if b"\r" in self._left[:-1] and now - self._shown_at > _BAR_EVERY_S:
            bar, _, left = self._left.rpartition(b"\r")
            if shown := _visible(bar):  # empty before the first bar, which starts with a carriage return
                lines.append(shown)
                self._left, self._shown_at = left, now
        if len(self._left) > _LONGEST_LINE:
            lines += self.rest()
        return lines

    def rest(self) -> list[str]:
        left, self._left = self._left, b""
        return [_visible(left)] if left.strip() else []


def _visible(line: bytes) -> str:
    """What a terminal shows of a line that was rewritten with carriage returns, or with backspaces as Keras does."""
    return line.rstrip(b"\r\b").rpartition(b"\r")[2].decode(errors="replace")


def _open_files(names: Sequence[str], folder: Path | None) -> dict[int, BinaryIO]:
    if folder is None:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {id: open(folder / _file_name(name), "ab", buffering=0) for id, name in enumerate(names)}
    except OSError as error:
        why = f"The log files cannot be written to {str(folder)!r}: {error.strerror}."
        raise InputError(f"{why} Give another folder with --logs DIR, or use --no-logs.") from None


def _file_name(name: str) -> str:
    return f"{name.replace(' ', '-')}.log"
