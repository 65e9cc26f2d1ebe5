"""`python -m tfgpu.launch.functions.guard SCRIPT ARGS`: `python -m tfgpu.run`, in a process that dies with its parent.

An engine may kill the process that started this one at any time, with a signal that cannot be caught.
"""

import os
import runpy
import signal
import threading

from tfgpu.launch.functions.pipes import PARENT


def die_with_parent(pipe: int) -> None:
    """Ends this process and those that it started once the other end of the pipe is closed.

    Args:
        pipe: file descriptor of the end to read.
    """

    def watch():
        os.read(pipe, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="tfgpu-guard", daemon=True).start()


if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT)))
    runpy.run_module("tfgpu.run", run_name="__main__", alter_sys=True)
