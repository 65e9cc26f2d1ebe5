"""`python -m tfgpu.launch.functions.guard SCRIPT ARGS`: `python -m tfgpu.run`, in a process that dies with its parent.

An engine may kill the process that started this one at any time, with a signal that cannot be caught.
"""

import atexit
import contextlib
import gc
import io
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Sequence

from tfgpu.launch.functions.pipes import FOLDERS, PARENT


def die_with_parent(pipe: int, folders: Sequence[str] = ()) -> None:
    """Ends this process and those that it started once the other end of the pipe is closed.

    A process of its own waits for that. A thread could not act while TensorFlow hangs with Python's lock, nor while
    the interpreter comes to its end.

    Args:
        pipe: file descriptor of the end to read.
        folders: what is removed then.
    """
    worker = os.getpid()
    if os.fork():
        os.close(pipe)
        return
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(pipe, 1)
    if os.getppid() == worker:
        os.kill(worker, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def leave(code: int) -> None:
    """Ends this process as the interpreter would, but without taking its objects apart.

    tf.data's threads that call Python functions meanwhile are lost there, and a data set that is taken apart waits
    for them for ever.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in gc.get_objects():
        if type(file) in (io.TextIOWrapper, io.BufferedWriter):
            with contextlib.suppress(OSError, ValueError):  # a full disk; it is closed
                file.flush()
    os._exit(code)


def _run() -> int:
    """Runs the script; returns the exit code."""
    try:
        runpy.run_module("tfgpu.run", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT)), os.environ.pop(FOLDERS).split(os.pathsep))
    leave(_run())
