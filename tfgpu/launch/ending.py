"""`python -m tfgpu.launch.ending SCRIPT ARGS`: runs `python -m tfgpu.run`, and exits as soon as the script is done.

A normal interpreter exit destroys all objects first, which can block forever. `heeded` handles Ctrl-C in a script that
`tfgpu.run` runs, wherever the script is.
"""

import _thread
import atexit
import contextlib
import gc
import io
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

HEEDED_S = 1.0
"""Seconds in which Python handles Ctrl-C, unless it is in a call of C++."""
_CAUSED_S = 60.0
"""Seconds after Ctrl-C in which it counts as the cause of an error."""
_LOST_S = 0.05
_SAME_S = 0.02
"""Seconds after Ctrl-C in which another one is the same: a terminal and a launcher may both send it."""
_FLUSH_S = 10.0
_AGAIN_S = 0.5
"""Seconds after the first Ctrl-C in which another one does not end the process: a key may be pressed twice in a row."""
_LOST_OUTPUT = 120
"""Exit code of an interpreter that could not flush its standard output."""


def end_with(main: Callable[[], object]) -> NoReturn:
    """Calls a function and exits with the code that Python would give for its `SystemExit`, error or return.

    Example:
        >>> end_with(lambda: runpy.run_path("train.py"))  # doctest: +SKIP
    """
    code = 0
    try:
        main()
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code & 0xFF)


def leave(code: int) -> NoReturn:
    """Ends this process as the interpreter would, but without destroying its objects.

    tf.data's threads cannot call Python functions at that stage, and destroying a dataset waits for them forever.
    Python's open files are flushed; what a `__del__` or C++ would write is lost. A thread that still writes is waited
    for, unless Ctrl-C comes twice.
    """
    _heed_twice(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(Exception):
            print(f"The output could not be flushed: {error}", file=sys.stderr)
        code = code or _LOST_OUTPUT
    # Another thread may hold a file forever, in a write that blocks.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(code)


def _heed_twice(code: int) -> None:
    """Makes a first Ctrl-C say what is waited for, and a later one end the process."""
    asked_at: list[float] = []

    def heed(number: int, frame: object) -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
                print("Files may still be written. Press Ctrl-C once more to end without them.", file=sys.stderr)
        elif time.monotonic() - asked_at[0] > _AGAIN_S:
            os._exit(code)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, heed)


def _flush_files() -> None:
    gc.unfreeze()
    files = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]
    # Each of these writes into the next.
    ends = [file.flush for file in files if isinstance(file, io.TextIOWrapper)]
    ends += [file.close for file in files if type(file).__module__ in ("gzip", "bz2", "lzma")]
    buffered = io.BufferedWriter | io.BufferedRandom | io.BufferedRWPair
    ends += [file.flush for file in files if isinstance(file, buffered)]
    for end in ends:
        with contextlib.suppress(Exception):  # a full disk; it is closed
            end()


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


if __name__ == "__main__":
    end_with(lambda: runpy.run_module("tfgpu.run", run_name="__main__", alter_sys=True))
