"""`python -m tfgpu.launch.functions.guard SCRIPT ARGS`: `python -m tfgpu.run`, in a process that dies with its parent.

An engine may kill the process that started this one at any time, with a signal that cannot be caught.
"""

import contextlib
import os
import runpy
import shutil
import signal
from collections.abc import Sequence

from tfgpu.launch.ending import end_with
from tfgpu.launch.functions.pipes import FOLDERS, PARENT


def die_with_parent(pipe: int, folders: Sequence[str] = ()) -> None:
    """Ends this process and those that it started once the other end of the pipe is closed.

    A process of its own waits for that. A thread could not act while TensorFlow hangs with Python's lock, nor while
    the interpreter comes to its end. It is no child of this one, whose script may wait for children of its own.

    Args:
        pipe: file descriptor of the end to read.
        folders: what is removed then.
    """
    worker = os.pidfd_open(os.getpid())
    between = os.fork()
    if between:
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the system has seen to it
            os.waitpid(between, 0)
        os.close(pipe)
        os.close(worker)
        return
    if os.fork():
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    low, high = sorted((pipe, worker))
    os.closerange(0, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(pipe, 1)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(worker, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT)), os.environ.pop(FOLDERS).split(os.pathsep))
    end_with(lambda: runpy.run_module("tfgpu.run", run_name="__main__", alter_sys=True))
