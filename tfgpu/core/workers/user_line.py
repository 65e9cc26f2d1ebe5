"""The line of the user's code that calls: what an error names."""

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def of_thread(thread: int | None = None) -> str:
    """Where a thread is now, as `"train.py:30"`: the innermost line outside installed packages, or "".

    Args:
        thread: its `ident`; None is the calling one.
    """
    frame = sys._current_frames().get(threading.get_ident() if thread is None else thread)
    return _shown(walk_stack(frame) if frame is not None else ())


def of_error(traceback: TracebackType | None) -> str:
    """Where an error comes from, as `of_thread`."""
    return _shown(reversed(list(walk_tb(traceback))))


def is_users(name: str) -> bool:
    """Whether a file is the user's: outside Python, tfgpu and installed packages."""
    return not (name.startswith(("<frozen ", *_folders())) or f"{os.sep}site-packages{os.sep}" in name)


def _shown(places: Iterable[tuple[FrameType, int]]) -> str:
    for frame, number in places:
        name = frame.f_code.co_filename
        if is_users(name):
            path = Path(name)
            return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else name}:{number}"
    return ""


@cache
def _folders() -> tuple[str, ...]:
    """Those of installed packages, of tfgpu and of Python itself."""
    paths = sysconfig.get_paths()
    return _PACKAGE, *(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
