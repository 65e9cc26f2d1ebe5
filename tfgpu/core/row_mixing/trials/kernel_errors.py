"""A trial's failures stay off the screen: TensorFlow's kernels write a warning for each, which names values of ours.

A label of -100 in cross-entropy is tried because some losses ignore it. Where one does not, the kernel fails, the trial
goes on without that label, and the user would read that -100 is no valid label.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

# Up to TensorFlow 2.19, the level follows the date and the time; since 2.20, it is the line's first letter.
_LINES = r"^([IWE][0-9]{4}|[0-9-]{10} [0-9:.]+: [IWE]) .*\b(op_kernel|local_rendezvous)\.cc:[0-9]+\] "
_entered = threading.Lock()


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Lets a process filter file descriptor 2, which TensorFlow's C++ code writes to. It outlives a crash of this one.

    Everything else that any thread writes meanwhile appears at once. TF_CPP_MIN_LOG_LEVEL=0 shows all.
    """
    is_first = _entered.acquire(blocking=False)
    try:
        shown = _filter() if is_first and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1" else None
        try:
            yield
        finally:
            if shown is not None:
                _end(*shown)
    finally:
        if is_first:
            _entered.release()


def _filter() -> tuple[int, subprocess.Popen] | None:
    """The screen, and the process that writes to it; None without a screen or `grep`."""
    try:
        screen = os.dup(2)
    except OSError:
        return None
    try:
        command = ["grep", "--line-buffered", "-avE", _LINES]
        process = subprocess.Popen(  # in a session of its own, which Ctrl-C does not reach
            command, stdin=subprocess.PIPE, stdout=screen, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        os.close(screen)
        return None
    _flush()
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    return screen, process


def _end(screen: int, process: subprocess.Popen) -> None:
    _flush()
    os.dup2(screen, 2)
    os.close(screen)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was started meanwhile has the same screen
        process.wait(timeout=1)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
