"""The end of a worker's process, at once when its script is done."""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends this process with the exit code of a function, or as Python would after its error.

    Example:
        >>> end_with(lambda: main(sys.argv[1:]))  # doctest: +SKIP
    """
    try:
        code = main()
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code & 0xFF)


def leave(code: int) -> NoReturn:
    """Ends this process as the interpreter would, but without taking its objects apart.

    tf.data's threads that call Python functions meanwhile are lost there, and a data set that is taken apart waits
    for them for ever. Files that are open are written to their end.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    files = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]
    for end in (_flush_text, _close_compressed, _flush_buffers):  # each writes into the next
        for file in files:
            with contextlib.suppress(Exception):  # a full disk; it is closed
                end(file)
    os._exit(code)


def _flush_text(file: io.IOBase) -> None:
    if type(file) is io.TextIOWrapper:
        file.flush()


def _close_compressed(file: io.IOBase) -> None:
    if type(file).__module__ in ("gzip", "bz2", "lzma"):
        file.close()


def _flush_buffers(file: io.IOBase) -> None:
    if type(file) in (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair):
        file.flush()
