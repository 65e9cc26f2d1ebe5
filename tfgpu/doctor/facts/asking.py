"""Answers questions in separate processes, so that a library that hangs or crashes does not end the doctor.

The process prints each answer as soon as it is known, so that answers before a crash are kept.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tfgpu.launch import processes

INTERPRETER = (sys.executable,)
_MARK = "tfgpu-fact "
_LONGEST = 300
_KILLED_S = 2.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, negative for a signal; `None` after a timeout.
        out: its stdout.
        err: its stderr.
        how: a description of the end.
    """

    code: int | None
    out: str
    err: str
    how: str


class Askers(ThreadPoolExecutor):
    """Threads that ask in parallel. An error or Ctrl-C in the waiting thread ends their processes.

    Attributes:
        stop: to pass to `run` and `ask`.
    """

    def __init__(self, most: int | None = None):
        super().__init__(most)
        self.stop = threading.Event()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        if kind is not None:
            self.stop.set()
        return super().__exit__(kind, *rest)


def run(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    seconds: float,
    directory: str | None = None,
    stop: threading.Event | None = None,
) -> Ended:
    """Runs a command until its end, the timeout, or `stop`; then kills it with its children.

    A process that hangs in the kernel, as with a lost GPU, cannot be killed, and is abandoned.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen(command, env=dict(environ), cwd=directory, start_new_session=True, **files)
        except OSError as error:
            return Ended(None, "", "", f"{command[0]} cannot be started: {error.strerror or error}")
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds) if stop is None else _wait(process, seconds, stop)
        finally:
            processes.send_to_group(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(code, *texts, _words(code, texts[1], seconds))


def ask(module: str, names: Sequence[str], **options: Any) -> dict[str, dict]:
    """As `ask_with_log`, without the log."""
    return ask_with_log(module, names, **options)[0]


def ask_with_log(
    module: str,
    names: Sequence[str],
    *,
    environ: Mapping[str, str],
    seconds: float,
    stop: threading.Event | None = None,
    **options: Any,
) -> tuple[dict[str, dict], str]:
    """Answers questions of a module in a separate process.

    Args:
        module: its full name; its `QUESTIONS` are functions by name.
        names: the questions, in order.
        environ: the environment of the process.
        seconds: time limit for all questions together.
        stop: ends the process early.
        options: arguments for the questions.

    Returns:
        The answers by name (`{"error": why}` for a failed one), and what the process wrote to stderr.
    """
    code = f"from tfgpu.doctor.facts import asking; asking.answer({module!r}, {list(names)!r}, {options!r})"
    ended = run([*INTERPRETER, "-c", code], environ=environ, seconds=seconds, stop=stop)
    return {name: {"error": ended.how} for name in names} | answers(ended.out), ended.err


def answer(module: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Prints the answer to each question; `ask` runs this in a separate process."""
    import importlib

    questions: Mapping[str, Callable[..., dict]] = importlib.import_module(module).QUESTIONS
    for name in names:
        try:
            found = questions[name](**options)
        except BaseException as error:  # A broken package may raise anything, even SystemExit.
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]}
        tell(name, found)


def tell(name: str, found: Mapping[str, Any]) -> None:
    """Prints one answer, on a line that `answers` finds."""
    print(f"\n{_MARK}{json.dumps({name: found})}", flush=True)


def answers(text: str) -> dict[str, dict]:
    """Extracts the answers from an output.

    Example:
        >>> answers('noise\\ntfgpu-fact {"a": {"b": 1}}\\ntfgpu-fact {"broken')
        {'a': {'b': 1}}
    """
    found: dict[str, dict] = {}
    for line in text.splitlines():
        _, mark, told = line.partition(_MARK)
        with contextlib.suppress(ValueError):
            told = json.loads(told) if mark else {}
            found |= told if isinstance(told, dict) else {}
    return found


def with_tfgpu(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with this tfgpu at the end of PYTHONPATH, so that it hides no package of the user."""
    parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), parent]))
    return {**environ, "PYTHONPATH": path}


def _wait(process: subprocess.Popen, seconds: float, stop: threading.Event) -> int:
    until = time.monotonic() + seconds
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            if stop.is_set() or time.monotonic() >= until:
                raise


def _words(code: int | None, err: str, seconds: float) -> str:
    if code is None:
        return f"no answer within {seconds:g} s"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    lines = err.strip().splitlines()
    return f"the process ended with code {code}" + (f": {lines[-1][:_LONGEST]}" if lines else "")
