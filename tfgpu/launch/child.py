"""One supervised process: its start, its pipes, its heartbeat and its end."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tfgpu.launch import heartbeat, processes
from tfgpu.launch.functions.pickled import REPORTS

STDOUT, STDERR, REPORT, RESULT = 1, 2, 3, 4
"""The streams of a process: its output, its reports, and its function's result."""
_RUNNERS = {"tfgpu.run", "tfgpu.launch.ending"}
"""Modules that start with Ctrl-C blocked, and unblock it when they can report it: Python's start prints a traceback."""


@dataclass(eq=False)
class Child:
    """A process with a heartbeat file, and with pipes for what it prints.

    Args:
        id: the launcher's number for it.
        command: program and arguments.
        environment: variables besides this process's own.
        heart: the heartbeat file, which TFGPU_HEARTBEAT names.
        directory: its working directory; None: this process's.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.
        reports: whether it gets a pipe for its reports.
        is_captured: whether its output goes through pipes, and it runs in a session of its own. Otherwise it shares
            this process's streams and session, as Slurm needs.

    Attributes:
        code: its exit code, negative for a signal; None while it runs.
        streams: the number of the stream by the file descriptor of its pipe.
        watch: its heartbeat.
    """

    id: int
    command: list[str]
    environment: dict[str, str]
    heart: Path
    directory: str | None = None
    heartbeat_timeout_s: float = 0.0
    reports: bool = False
    is_captured: bool = True

    def __post_init__(self) -> None:
        self.code: int | None = None
        self.streams: dict[int, int] = {}
        self.watch = heartbeat.Watch(self.heart, self.heartbeat_timeout_s)
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts the process, which dies with this one. In its own session, the terminal's Ctrl-C does not reach it.

        Raises:
            OSError: there is no such program or directory.
        """
        self.watch.path.unlink(missing_ok=True)  # Left by an earlier process.
        supervisor, pipe = os.getpid(), subprocess.PIPE
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe} if self.is_captured else {}
        reports, reporting = os.pipe() if self.reports else (-1, -1)
        environment = {**os.environ, **self.environment, heartbeat.HEARTBEAT: str(self.heart)}
        environment |= {REPORTS: str(reporting)} if self.reports else {}
        options = {"env": environment, "cwd": self.directory, "bufsize": 0, **streams}
        options |= {"start_new_session": self.is_captured, "pass_fds": [reporting] if self.reports else []}
        try:
            # A `preexec_fn` is safe, since the supervisor has one thread.
            self._process = subprocess.Popen(self.command, preexec_fn=lambda: self._prepare(supervisor), **options)
            if self.is_captured:
                self.streams = {self._process.stdout.fileno(): STDOUT, self._process.stderr.fileno(): STDERR}
        except BaseException:
            for end in (reports, reporting) if self.reports else ():
                os.close(end)
            raise
        if self.reports:
            os.close(reporting)
            self.streams[reports] = REPORT
        for pipe in self.streams:
            os.set_blocking(pipe, False)

    def _prepare(self, supervisor: int) -> None:
        """Runs in the new process, before the program."""
        processes.die_with_parent(signal.SIGKILL, supervisor)
        if _RUNNERS.intersection(self.command):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self.code is None

    def ended(self, code: int) -> None:
        """Records the exit code that the supervisor has collected (`processes.reap`)."""
        self.code = self._process.returncode = code

    def wait(self, timeout_s: float) -> bool:
        """Waits for the process in place of `processes.reap`; returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(timeout_s)
        return not self.runs

    def close(self, pipe: int) -> None:
        """Closes a pipe at its end."""
        stream = self.streams.pop(pipe)
        if stream == REPORT:
            os.close(pipe)
        else:
            (self._process.stdout if stream == STDOUT else self._process.stderr).close()

    def send(self, number: int) -> None:
        """Signals the process only: its helpers (such as data loaders) must live while it saves."""
        if self.runs:
            processes.send(self.pid, number)
