"""A worker's TensorFlow process, started and watched by a process of the engine: a Ray actor, a Spark task.

TensorFlow runs in a process of its own, so that a restart begins with a clean one, and a crash ends nothing else.
"""

import collections
import contextlib
import json
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfgpu.cluster import Cluster
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.pipes import FOLDERS, PARENT, REPORTS
from tfgpu.launch.job import Job
from tfgpu.launch.restarts import SILENT

ATTEMPT, HEARTBEAT, STARTUP_TIMEOUT = "TFGPU_ATTEMPT", "TFGPU_HEARTBEAT", "TFGPU_STARTUP_TIMEOUT"
LAST_LINES = 40
_LOOK_S = 0.5
_LAST_OUTPUT_S = 5.0


@dataclass(frozen=True)
class Work:
    """What every worker is to do; it travels to all of them.

    Args:
        job: the launch.
        call: the packed function, or None where `job.script` is a file.
        paths: where the launching program finds modules, for those that are there on the worker's machine too.
        grace_s: seconds between SIGTERM and SIGKILL.
        start: which start of the group this is, from 0.
    """

    job: Job
    call: bytes | None = field(default=None, repr=False)
    paths: tuple[str, ...] = ()
    grace_s: float = 10.0
    start: int = 0


@dataclass(frozen=True)
class Ended:
    """How a worker's process ended.

    Args:
        rank: which worker.
        code: its exit code; negative for a signal, as `subprocess` has it.
        host: where it ran.
        lines: the last ones that it printed.
        result: what its function returned, packed.
    """

    rank: int
    code: int
    host: str = ""
    lines: tuple[str, ...] = ()
    result: bytes | None = field(default=None, repr=False)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def search_paths() -> tuple[str, ...]:
    """Where this program finds modules besides Python's own and the installed ones."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    found = [os.path.abspath(path or ".") for path in sys.path if os.path.exists(path or ".")]
    return tuple(path for path in found if os.path.realpath(path) not in installed and "lib-dynload" not in path)


class Child:
    """The running process of one worker.

    Args:
        work: what to do.
        cluster: this worker's place among the others.
        data: the first argument of the function, or None.
        environment: variables that it gets besides the job's.
        folders: the engine's own for this worker, which it removes itself unless it is killed.
    """

    def __init__(
        self,
        work: Work,
        cluster: Cluster,
        data: object = None,
        environment: dict[str, str] | None = None,
        folders: Sequence[Path] = (),
    ):
        self._work, self._rank = work, cluster.rank
        self._folder = Path(tempfile.mkdtemp(prefix="tfgpu-worker-"))
        self._folders = (self._folder, *folders)
        self._news: queue.Queue = queue.Queue()
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._ended: Ended | None = None
        script = work.job.script
        if work.call is not None:
            script = pickled.write(self._folder, work.call, data)
        parent, self._alive = os.pipe()
        progress, reporting = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tfgpu.launch.functions.guard", str(script), *work.job.arguments],
                env=self._environment(cluster, environment or {}, parent, reporting),
                pass_fds=(parent, reporting),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(parent)
            os.close(reporting)
        readers = self._read_output, lambda: self._read_reports(progress)
        self._readers = [threading.Thread(target=read, daemon=True) for read in readers]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._readers, self._watcher):
            thread.start()

    def news(self, wait_s: float) -> tuple[list[dict], Ended | None]:
        """What has happened since the last call: reports, and how the process ended where it has.

        Args:
            wait_s: how long to wait for something to happen.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=wait_s))
            while True:
                found.append(self._news.get_nowait())
        ended = next((item for item in found if isinstance(item, Ended)), None)
        return [item for item in found if isinstance(item, dict)], ended

    def stop(self) -> None:
        """Ends the process: SIGTERM, the grace period, SIGKILL to all that it started; removes its files."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(self._work.grace_s)
        except subprocess.TimeoutExpired:
            pass
        self._kill()
        self._watcher.join()
        with contextlib.suppress(OSError):
            os.close(self._alive)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self, cluster: Cluster, more: dict[str, str], parent: int, reporting: int) -> dict[str, str]:
        job = self._work.job
        # The engine's process may have found modules where a new Python would not look: what it was sent for the job.
        paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *search_paths(), *self._work.paths]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
            **more,
            **job.environment,
            "TF_CONFIG": cluster.tf_config(),
            ATTEMPT: str(self._work.start + 1),
            STARTUP_TIMEOUT: str(job.startup_timeout_s),
            HEARTBEAT: str(self._folder / "heart"),
            PARENT: str(parent),
            REPORTS: str(reporting),
            FOLDERS: os.pathsep.join(map(str, self._folders)),
        }

    def _read_output(self) -> None:
        name = f"worker-{self._rank}"
        with contextlib.ExitStack() as stack:
            log = None
            if self._work.job.logs is not None:
                Path(self._work.job.logs).mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(open(Path(self._work.job.logs) / f"{name}.log", "ab"))
            for line in self._process.stdout:
                self._lines.append(line.decode(errors="replace").rstrip("\n"))
                sys.stderr.write(f"[{name}] {self._lines[-1]}\n")
                if log is not None:
                    log.write(line)
                    log.flush()

    def _read_reports(self, pipe: int) -> None:
        with open(pipe) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # the last line of a process that was killed
                    self._news.put(json.loads(line))

    def _watch(self) -> None:
        heart, seen, at = self._folder / "heart", None, time.monotonic()
        silent, most_s = False, self._work.job.silence_s or math.inf
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
            beat = heart.stat().st_mtime_ns if heart.exists() else None
            if beat != seen:
                seen, at = beat, time.monotonic()
            if seen is not None and time.monotonic() - at > most_s:
                silent = True
                self._kill()
        self._kill()  # what it has started and left behind would keep its output open
        for reader in self._readers:
            reader.join(_LAST_OUTPUT_S)
        code = SILENT if silent else self._process.returncode
        result = pickled.result_of(self._folder) if code == 0 else None
        self._news.put(Ended(self._rank, code, socket.gethostname(), tuple(self._lines), result))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
