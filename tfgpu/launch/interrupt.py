"""Ctrl-C in a script that `tfgpu.run` runs, wherever the script is."""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

HEEDED_S = 1.0
"""Seconds in which Python handles Ctrl-C, unless it is in a call of C++."""
_CAUSED_S = 60.0
"""Seconds after Ctrl-C in which it counts as the cause of an error."""
_LOST_S = 0.05
_SAME_S = 0.02
"""Seconds after Ctrl-C in which another one is the same: a terminal and a launcher may both send it."""


@contextlib.contextmanager
def heeded(end_waiting: Callable[[], None]) -> Iterator[None]:
    """In the block, Ctrl-C raises KeyboardInterrupt, also where Python alone would not.

    - Python handles Ctrl-C only after the main thread has returned from C++. A collective may wait there forever for
      another worker: `end_waiting` ends it.
    - Python drops an exception in `__del__` and in a weak reference's callback: it is raised again.
    - Within a call of TensorFlow, KeyboardInterrupt becomes another error, and workers that are interrupted together
      see each other leave: it is raised in place of such an error.

    A script's own handler of Ctrl-C stays in place. Outside the main thread this does nothing.

    Args:
        end_waiting: ends the calls in which this process waits for others; called in a thread, every second until
            Python handles it.
    """
    came_at: list[float] = []
    heard = threading.Event()

    def note(number: int, frame: object) -> None:
        is_same = bool(came_at) and time.monotonic() - came_at[-1] < _SAME_S
        came_at.append(time.monotonic())
        heard.set()
        if not is_same:
            signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        with _hearing(heard, note, end_waiting), _nothing_lost():
            yield
    except Exception as error:
        if not came_at or time.monotonic() - came_at[-1] > _CAUSED_S:
            raise
        raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _hearing(heard: threading.Event, note: Callable, end_waiting: Callable[[], None]) -> Iterator[None]:
    """Calls `end_waiting` if Ctrl-C has come and its handler `note`, which sets `heard`, does not run.

    The C handler of a signal writes its number into a pipe at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                if signal.SIGINT not in numbers:
                    continue
                while not heard.wait(HEEDED_S) and signal.getsignal(signal.SIGINT) is note:
                    end_waiting()
                heard.clear()

    def forget() -> None:
        if is_open:
            signal.set_wakeup_fd(-1)

    is_open = [True]
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)  # Ctrl-C in a child is not this process's
    threading.Thread(target=listen, name="tfgpu-ctrl-c", daemon=True).start()
    try:
        yield
    finally:
        is_open.clear()
        signal.set_wakeup_fd(before)
        os.close(writing)
        heard.set()


@contextlib.contextmanager
def _nothing_lost() -> Iterator[None]:
    """Raises KeyboardInterrupt again where Python would drop it."""
    stock = sys.unraisablehook

    def hook(lost) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(_LOST_S, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            stock(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = stock
