"""Starts TensorFlow quietly, and prints errors in one line."""

import contextlib
import importlib
import os
import signal
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape

from tfgpu.quiet import starting


def started(name: str, *, debug: bool = False, says: bool = False) -> ModuleType:
    """Starts TensorFlow without its messages, unless the user debugs or has set a log level, and imports a module.

    Args:
        name: of the module.
        debug: whether the user debugs.
        says: whether to say it on a terminal meanwhile.
    """
    with Console(stderr=True).status("starting TensorFlow") if says else contextlib.nullcontext():
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        if not (debug or debugging()):
            with starting("3"):
                imported("tensorflow")
        return imported(name)


def imported(name: str) -> ModuleType:
    """Imports a slow module such that Ctrl-C always interrupts the import.

    A library's C++ code may otherwise turn the interrupt into another error, or a bare `except` may swallow it.
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


def debugging(words: Sequence[str] = ()) -> bool:
    return "--debug" in words or os.environ.get("TFGPU_DEBUG", "0") not in ("", "0")


def complain(message: str) -> None:
    """Prints an error: on a terminal in lines that break between words, elsewhere in one line."""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=not console.is_terminal)
