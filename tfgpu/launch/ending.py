"""`python -m tfgpu.launch.ending SCRIPT ARGS`: runs `python -m tfgpu.run`, and exits as soon as the script is done.

A normal interpreter exit destroys all objects first, which can block forever.
"""

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
from collections.abc import Callable
from typing import NoReturn

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
    ends += [
        file.flush for file in files if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.BufferedRWPair)
    ]
    for end in ends:
        with contextlib.suppress(Exception):  # a full disk; it is closed
            end()


if __name__ == "__main__":
    end_with(lambda: runpy.run_module("tfgpu.run", run_name="__main__", alter_sys=True))
