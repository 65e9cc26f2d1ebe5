"""A group that a Python program launches with `ray_job` or `spark_job`: settings, reports, result and errors."""

import contextlib
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, MachineError, is_number
from tfgpu.launch import layout
from tfgpu.launch.child import REPORT, RESULT
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.relay import EngineLink, Work, search_paths
from tfgpu.launch.group import Group, Member
from tfgpu.launch.job import Job
from tfgpu.launch.layout import specs_for
from tfgpu.launch.processes import Signals
from tfgpu.launch.restarts import WRONG_INPUT, Ending, Restarts, supervise

_log = logging.getLogger(__name__)

Progress = Callable[[dict], None]
Connect = Callable[[int], AbstractContextManager[Sequence[EngineLink]]]
"""Starts the workers' supervisors for an attempt, and ends them."""


def work_of(train: Callable | str | Path, arguments: Sequence, *, grace_period_s: float, **settings: Any) -> Work:
    """Describes the work in the form that is sent to the workers.

    Args:
        train: a function, or the path of a script.
        arguments, settings: as in `Job`; `logs` and `environment` may be None.
        grace_period_s: seconds that workers get to save after a request to stop that no failure caused.

    Raises:
        InputError: a setting is out of range, or a function cannot be pickled.
    """
    if not is_number(grace_period_s) or not grace_period_s >= 0:
        raise InputError(f"`grace_period_s` must be at least 0 seconds. Received: {grace_period_s!r}.")
    logs, environment = settings["logs"], settings["environment"]
    settings |= {"logs": None if logs is None else Path(logs).absolute(), "environment": dict(environment or {})}
    if callable(train):
        name = f"{getattr(train, '__name__', 'function')}()"
        return Work(Job(name, **settings), pickled.pack(train, arguments), search_paths(), grace_period_s)
    if not isinstance(train, (str, os.PathLike)):
        raise InputError(f"`train` must be a function, or the path of a script. Received: {train!r}.")
    script = os.path.abspath(train) if os.path.exists(train) else str(train)
    return Work(Job(script, tuple(map(str, arguments)), **settings), None, search_paths(), grace_period_s)


def run_until_done(work: Work, connect: Connect, on_progress: Progress | None) -> object:
    """Runs the group, and restarts it after failures and preemptions as the restart policy allows.

    Args:
        work: what the workers run.
        connect: starts the workers' supervisors for an attempt.
        on_progress: called with the chief's reports.

    Returns:
        What the chief's function returned; None for a script.

    Raises:
        InputError: a worker found wrong input.
        MachineError: a worker failed, and no restart is left.
    """
    program = Program(work, connect, Transcript(on_progress))
    ending = supervise(program, program.restarts)
    if ending.code == 0:
        return program.result()
    raise program.error(ending)


class Transcript:
    """Collects what happens in the group for a program, in place of the `Screen` of a terminal.

    Args:
        on_progress: called with the chief's reports.

    Attributes:
        said: the launcher's messages of this attempt.
        result: what the chief's function returned, pickled.
    """

    def __init__(self, on_progress: Progress | None):
        self.on_progress = on_progress
        self.said: list[str] = []
        self.result: bytes | None = None
        self._attempt = 1
        self._report = b""  # The start of an incomplete line.
        self._last: dict[int, list[str]] = {}

    def begin(self, attempt: int) -> None:
        """Discards what the previous attempt left."""
        self.said, self.result, self._attempt, self._report, self._last = [], None, attempt, b"", {}

    def output(self, id: int, stream: int, data: bytes) -> None:
        """Records a report, a result, or the last lines of a worker."""
        if stream == REPORT:
            *lines, self._report = (self._report + data).split(b"\n")
            for line in lines:
                self._tell(line)
        elif stream == RESULT:
            self.result = data if id == 0 else self.result
        else:
            self._last[id] = data.decode(errors="replace").splitlines()

    def finish(self, id: int) -> None:
        """Does nothing: no output is buffered here."""

    def say(self, text: str, *, error: bool = False) -> None:
        """Keeps a message of the launcher for the log or the final error."""
        self.said.append(text)

    def last(self, id: int) -> list[str]:
        """The last lines of a worker that has ended."""
        return self._last.get(id, [])

    def path(self, id: int) -> None:
        """Returns None: log files are on the workers' machines."""

    def _tell(self, line: bytes) -> None:
        if self.on_progress is not None:
            self.on_progress({"start": self._attempt - 1, **json.loads(line)})


class Program:
    """The engine of `ray_job` and `spark_job`.

    Args:
        work: what the workers run.
        connect: starts the workers' supervisors for an attempt.
        transcript: records what happens.
    """

    def __init__(self, work: Work, connect: Connect, transcript: Transcript):
        self.restarts = Restarts(work.job.max_restarts)
        self._work, self._connect, self._transcript = work, connect, transcript
        self._tasks = layout.tasks(work.job, work.job.workers)
        self._attempt = 1

    def run(self, attempt: int) -> Ending:
        """Runs the group once."""
        self._attempt = attempt
        self._transcript.begin(attempt)
        job, members = self._work.job, [Member(task.name, task.node) for task in self._tasks]
        specs = specs_for(job, self._tasks, attempt, self._command, environ={}, is_engine=True)
        # Without `with`, no signal is handled: Ctrl-C stays a KeyboardInterrupt of the program.
        with self._connect(attempt) as links, contextlib.closing(Signals()) as signals:
            limits = {"grace_period_s": self._work.grace_period_s, "heartbeat_timeout_s": job.heartbeat_timeout_s}
            group = Group(members, links, specs, self._transcript, signals, self.restarts, **limits)
            try:
                return group.run()
            except BaseException:
                self._transcript.on_progress = None
                group.stop()
                raise
            finally:
                for link in links:
                    link.close()

    def may_restart(self, ending: Ending) -> bool:
        """Leaves every failure to the restart policy."""
        return True

    def restart(self, ending: Ending, wait_s: float | None) -> bool:
        """Logs what happened, and waits."""
        if wait_s is None:
            return False
        words = f"Attempt {self._attempt + 1} starts in {wait_s:g} s ({self.restarts})."
        _log.warning("%s", "\n".join([*self._transcript.said, words]))
        time.sleep(wait_s)
        return True

    def result(self) -> object:
        """What the chief's function returned; None for a script."""
        return None if self._transcript.result is None else pickle.loads(self._transcript.result)

    def error(self, ending: Ending) -> Exception:
        """The error to raise for a group that has failed and is not restarted."""
        message = "\n".join(self._transcript.said)
        if ending.code == WRONG_INPUT:
            return InputError(message)
        used = f"All restarts are used ({self.restarts.most})." if self.restarts.most else "Restarts: `max_restarts=3`."
        return MachineError(f"{message}\n{used}")

    def _command(self, facts: Mapping[str, object]) -> list[str]:
        return [facts["python"], "-u", "-m", "tfgpu.launch.ending", facts["script"], *self._work.job.arguments]
