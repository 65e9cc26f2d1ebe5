"""A CSV table that grows by complete rows, and can be read meanwhile."""

import contextlib
import csv
import errno
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfgpu import atomic
from tfgpu.sensors.sample import Value

_TAIL_BYTES = 1 << 18


class Table:
    """Appends rows to a CSV file, each with one write. An existing file is continued.

    If a row has new columns (another GPU), the file is rewritten with them and replaced atomically. A partial row left
    by a failed write is removed.

    Args:
        path: the file; its folder is created with the first row.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._columns: list[str] | None = None

    def append(self, row: Mapping[str, Value]) -> None:
        """Adds one row.

        Raises:
            OSError: it could not be written; later rows may succeed.
        """
        if self._columns is not None and not self.path.exists():  # The file was removed; start again.
            self._columns = None
        if self._columns is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._columns = self._resumed()
        if new := [name for name in row if name not in self._columns]:
            columns, rows = [*self._columns, *new], read(self.path) if self._columns else []
            atomic.write_text(self.path, _text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
            self._columns = columns
        line = _text(self._columns, [row]).encode()
        # Unbuffered: a buffer would retry the failed write.
        with open(self.path, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):  # a full disk may accept a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def _resumed(self) -> list[str]:
        """The columns of an existing file, after removing an incomplete last row."""
        if not self.path.exists():
            return []
        if not self.path.is_file():  # Reading a pipe or a device may never end.
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(self.path, whole)
        first = content[:whole].split(b"\n", 1)[0].decode(errors="replace")
        return next(csv.reader([first]), []) if first else []


def read(path: str | Path) -> list[dict[str, Value]]:
    """Reads all complete rows of a table; numbers become floats, empty cells `None`.

    Raises:
        OSError: it cannot be read.
    """
    content = Path(path).read_bytes()
    return _rows(content[: content.rfind(b"\n") + 1].decode(errors="replace"))


def last(path: str | Path, count: int) -> list[dict[str, Value]]:
    """Reads the last complete rows of a table, from the end of the file.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        header = file.readline()
        size = file.seek(0, os.SEEK_END)
        file.seek(max(len(header), size - _TAIL_BYTES))
        tail = file.read()
        if size - len(tail) > len(header):
            tail = tail[tail.find(b"\n") + 1 :]
    return _rows((header + tail[: tail.rfind(b"\n") + 1]).decode(errors="replace"))[-count:]


def _rows(text: str) -> list[dict[str, Value]]:
    found = []
    with contextlib.suppress(csv.Error):  # Stop at rows that another program has damaged.
        for row in csv.DictReader(io.StringIO(text.replace("\r", "").replace("\0", ""))):
            found.append({name: _value(cell) for name, cell in row.items() if isinstance(name, str)})
    return found


def _value(cell: str | None) -> Value:
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


def _text(columns: Sequence[str], rows: Sequence[Mapping[str, Value]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.15g}" if value.is_integer() else f"{value:.6g}" if abs(value) < 1e6 else f"{value:.13g}"
    return " ".join(str(value).split())
