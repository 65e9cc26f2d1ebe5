"""What every command begins and ends with: TensorFlow's start, and one line for an error."""

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape


def start_tensorflow(*, quiet: bool = True) -> None:
    """Imports TensorFlow without its start-up notes, unless the user has asked for a level of them."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if not quiet or "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # The first notes are written before TensorFlow reads that variable, past Python's own stderr.
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        screen = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            imported("tensorflow")
        except Exception:
            aside.seek(0)
            os.write(screen, aside.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def imported(name: str) -> ModuleType:
    """Imports a module that takes seconds; Ctrl-C ends that whatever the module makes of the interrupt.

    A library's C++ code may turn it into an error of its own, or an `except` without a name may swallow it.
    """
    from tfgpu.recipes.directory import NOTHING_WRITTEN

    interrupts = []

    def interrupt(*_: Any) -> None:
        interrupts.append(True)
        raise KeyboardInterrupt

    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if heeded:
            signal.signal(signal.SIGINT, interrupt)
        return importlib.import_module(name)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt(NOTHING_WRITTEN) from None


def debugging(words: Sequence[str]) -> bool:
    return "--debug" in words or os.environ.get("TFGPU_DEBUG", "0") not in ("", "0")


def complain(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}")
