"""The line of the user's code that calls: what an error names."""

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def of_thread(thread: int | None = None) -> str:
    """Where a thread is now, as `"train.py:30"`: the innermost line outside installed packages, or "".

    Args:
        thread: its `ident`; None is the calling one.
    """
    frame = sys._current_frames().get(threading.get_ident() if thread is None else thread)
    lines = ((each.f_code.co_filename, each.f_lineno) for each in _outward(frame))
    return _shown(lines)


def of_error(traceback: TracebackType | None) -> str:
    """Where an error comes from, as `of_thread`."""
    lines = []
    while traceback is not None:
        lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _shown(reversed(lines))


def _outward(frame: FrameType | None):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _shown(lines: Iterable[tuple[str, int]]) -> str:
    for name, number in lines:
        if not _is_installed(name):
            path = Path(name)
            return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else name}:{number}"
    return ""


def _is_installed(name: str) -> bool:
    """Whether a file belongs to an installed package, tfgpu or Python itself."""
    return name.startswith("<frozen ") or name.startswith(_folders()) or f"{os.sep}site-packages{os.sep}" in name


@cache
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return _PACKAGE, *(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
