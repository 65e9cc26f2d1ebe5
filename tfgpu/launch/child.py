"""One process of a group, as the supervisor of its node sees it."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tfgpu.launch import processes


class Child:
    """A process with pipes, and a file that it may touch as a sign of life.

    Args:
        id: the launcher's number for it.
        command: program and arguments.
        environment: variables besides this process's own.
        heart: the file. TFGPU_HEARTBEAT names it.
        directory: where it runs; None: here.
        silence_s: seconds without a sign of life, once there was one, after which it counts as silent; 0: never.
    """

    def __init__(
        self,
        id: int,
        command: list[str],
        environment: dict[str, str],
        heart: Path,
        directory: str | None = None,
        silence_s: float = 0.0,
    ):
        self.id, self.code, self.streams = id, None, {}
        self._command, self._directory = command, directory
        self._environment = {**environment, "TFGPU_HEARTBEAT": str(heart)}
        self._heart, self._silence_s = heart, silence_s
        self._beat_at, self._reported = None, False
        self.quiet_s = 0.0  # since the last sign of life; 0 before the first
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts it in a session of its own, so that no terminal's Ctrl-C reaches it before the launcher's word.

        Raises:
            OSError: there is no such program or directory.
        """
        self._heart.unlink(missing_ok=True)  # Of one that ran in its place before.
        supervisor = os.getpid()
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment},
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # Safe, since the supervisor has one thread.
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, supervisor),
        )
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self.streams[stream.fileno()] = number

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self.code is None

    def ended(self, code: int) -> None:
        """Notes its exit code, which the supervisor has collected for all its children."""
        self.code = self._process.returncode = code

    def close(self, stream: int) -> None:
        """Closes a pipe that has come to its end."""
        number = self.streams.pop(stream)
        (self._process.stdout if number == 1 else self._process.stderr).close()

    def send(self, number: int) -> None:
        """Signals the process alone: its helpers (of a data loader, say) must live while it saves."""
        if self.runs:
            processes.send(self.pid, number)

    def is_silent(self, passed_s: float) -> bool:
        """Looks for a new sign of life; says once that there has been none for too long.

        The file's time is compared with what it was, not with a clock: a clock may be set while a run lasts.

        Args:
            passed_s: seconds since the last look.
        """
        beat_at = None
        with contextlib.suppress(OSError):
            beat_at = self._heart.stat().st_mtime_ns
        if beat_at is None or beat_at != self._beat_at:
            self._beat_at, self.quiet_s = beat_at, 0.0
            return False
        self.quiet_s += passed_s
        if not self._silence_s or self.quiet_s < self._silence_s or self._reported:
            return False
        self._reported = True
        return True
