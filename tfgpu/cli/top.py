"""`tfgpu top`: a live view of machines and of a training."""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.cli.top_screen import drawn
from tfgpu.errors import InputError
from tfgpu.sensors import Sampler
from tfgpu.sensors.view import View, Viewer, folder_of

app = typer.Typer()
_FIRST_S = 0.5
_ANSWER_S = 30.0


@app.command(
    "top",
    cls=screen.Command,
    short_help="Show GPUs, CPUs, memory, and what limits a running training.",
    help="Show GPUs, their processes, CPUs, memory and disks; with RUN also its step time, energy and bottleneck.",
    epilog=screen.examples(
        "tfgpu top", "tfgpu top runs/best", "tfgpu top --once --json", before="Quit with q or Ctrl-C."
    ),
)
def top(
    run: argument(Path | None, "RUN", "A run directory, or the folder of a Monitor.") = None,
    once: option(bool, "Print once and exit.", "--once") = False,
    as_json: option(bool, "Print one line of JSON per update; with --once, a single document.", "--json") = False,
    every: option(float, "Time between updates.", metavar="SECONDS") = 1.0,
) -> None:
    if not 0.1 <= every <= 3600:
        raise InputError(f"--every must be from 0.1 to 3600 seconds. Received: {every}. Try 1.")
    if run is not None:
        folder_of(run)
    with ExitStack() as held:
        _leave_at_sigterm(held)
        try:
            viewer = Viewer(run, held.enter_context(Sampler(everything=True)))
            time.sleep(_FIRST_S if once else min(_FIRST_S, every))
            _show(viewer.look, once, as_json, every)
        except KeyboardInterrupt:  # The usual way to end it.
            pass
        except BrokenPipeError:  # The reader has closed the pipe; without this, Python reports it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show(look: Callable[[], View], once: bool, as_json: bool, every: float) -> None:
    console = _console()
    if as_json and once:
        print(json.dumps(look().as_json(), indent=2))
    elif as_json:
        while True:
            print(json.dumps(look().as_json()), flush=True)
            time.sleep(every)
    elif once or not console.is_terminal:
        console.print(drawn(look(), width=console.width))
    else:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(drawn(look(), width=console.width), refresh=True)
                if pressed(every) in ("q", "Q", "\x03"):
                    return


def _console(**settings: Any) -> Console:
    return Console(highlight=False, markup=False, emoji=False, **settings)


def _leave_at_sigterm(held: ExitStack) -> None:
    """Handles SIGTERM like Ctrl-C, so that the terminal is restored."""

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, leave)
        held.callback(signal.signal, signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Reads single keys; without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)

        def pressed(seconds: float) -> str:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
            # Not `sys.stdin.read`, which buffers. An empty read means that the terminal is gone.
            return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""

        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
