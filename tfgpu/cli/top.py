"""`tfgpu top`: a live view of machines and of a training."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from tfgpu.cli import screen
from tfgpu.cli.top_screen import drawn
from tfgpu.errors import InputError
from tfgpu.sensors import Sampler
from tfgpu.sensors.view import View, Viewer, folder_of

app = typer.Typer()
_FIRST_S = 0.5
_ANSWER_S = 30.0


@app.command(
    "top",
    cls=screen.first(
        run="A run directory, or the folder of a Monitor.",
        hosts="More machines to reach by ssh: host1,host2.",
        once=None,
        as_json="One line of JSON per update; with --once, a document.",
        every=None,
    ),
    short_help="Show GPUs, CPUs, memory, and what limits a running training.",
    help="Show GPUs, their processes, CPUs, memory and disks; with RUN also step time, energy and what limits it.",
    epilog=(
        "Quit with q or Ctrl-C.\n\n"
        "[bold]Examples[/]\n\n"
        "tfgpu top\n\n"
        "tfgpu top runs/best\n\n"
        "tfgpu top runs/best --hosts host1,host2\n\n"
        "tfgpu top --once --json"
    ),
)
def top(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory, or the folder of a Monitor.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="More machines to reach by ssh: host1,host2.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per update; with --once, a single document.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between updates.")] = 1.0,
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="ssh with your own options.")] = "ssh",
) -> None:
    if not 0.1 <= every <= 3600:
        raise InputError(f"--every must be from 0.1 to 3600 seconds. Received: {every}. Try 1.")
    if run is not None and hosts is None:
        folder_of(run)
    with ExitStack() as held:
        _leave_at_sigterm(held)
        try:
            others = [held.enter_context(Other(node, ssh, run, every)) for node in _nodes(hosts)]
            sampler = held.enter_context(Sampler(everything=True))
            viewer = Viewer(run if run is None or run.is_dir() else None, sampler)
            time.sleep(_FIRST_S if once else min(_FIRST_S, every))
            _show(lambda: [viewer.look(), *(other.look() for other in others)], others, once, as_json, every)
        except KeyboardInterrupt:  # The usual way to end it.
            pass
        except BrokenPipeError:  # The reader has closed the pipe; without this, Python reports it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show(look: Callable[[], list[View]], others: Sequence["Other"], once: bool, as_json: bool, every: float) -> None:
    console = _console()
    if once or (not as_json and not console.is_terminal):
        for other in others:
            other.wait()
        views = look()
        if as_json:
            print(json.dumps([view.as_json() for view in views], indent=2))
        else:
            console.print(drawn(views, width=console.width))
        return
    if as_json:
        while True:
            print(json.dumps([view.as_json() for view in look()]), flush=True)
            time.sleep(every)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(drawn(look(), width=console.width), refresh=True)
            if pressed(every) in ("q", "Q", "\x03"):
                return


def _console(**settings: Any) -> Console:
    return Console(highlight=False, markup=False, emoji=False, **settings)


class Other:
    """Runs `tfgpu top --json` on another machine through ssh, while the block lasts.

    Args:
        node: the machine, as ssh names it.
        ssh: the ssh command.
        run: the run to show.
        every: seconds between updates.
    """

    def __init__(self, node: str, ssh: str, run: Path | None, every: float):
        from tfgpu.launch.ssh import reached

        self._node, self._every = node, every
        words = ["-m", "tfgpu", "top", *([str(run)] if run else []), "--json", "--every", str(every)]
        self._command = reached(ssh, node, words)
        self._newest = View(node, error="no answer yet")
        self._at = time.monotonic()
        self._heard = threading.Event()

    def __enter__(self) -> "Other":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._listen, name=f"tfgpu-top-{self._node}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join(timeout=5)

    def look(self) -> View:
        """The latest view; an error if that is too old."""
        silent = time.monotonic() - self._at
        if silent > _ANSWER_S and not self._newest.error:
            return View(self._node, error=f"no answer for {silent:.0f} s")
        return self._newest

    def wait(self) -> None:
        """Waits for the first answer, a failure, or the timeout."""
        if not self._heard.wait(_ANSWER_S):
            self._newest = View(self._node, error=f"no answer within {_ANSWER_S:.0f} s")

    def _listen(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        for line in self._process.stdout:
            try:
                (told,) = json.loads(line)
                view = View.from_json({**told, "host": self._node})
                drawn([view], width=200)
            except (ValueError, TypeError, KeyError, AttributeError):  # Output of a login shell, or a malformed view.
                continue
            self._newest = view
            self._at = time.monotonic()
            self._heard.set()
        lines = self._process.stderr.read().strip().splitlines()
        self._newest = View(self._node, error=lines[-1][:200] if lines else "the connection has ended")
        self._heard.set()


def _nodes(hosts: str | None) -> list[str]:
    from tfgpu.launch.ssh import checked

    return [] if hosts is None else checked(hosts.split(","))


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
