"""A worker inside an engine's own process (a Ray actor, a Spark task): a node's supervisor, and its relay.

TensorFlow runs in its own process, so each attempt starts clean and a crash ends nothing else.
The supervisor's messages go to the launching program; what the worker prints goes to a log here and to the engine's.
"""

import contextlib
import os
import queue
import shutil
import socket
import sys
import sysconfig
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgpu.launch.child import RESULT, STDERR, STDOUT
from tfgpu.launch.functions import pickled
from tfgpu.launch.job import Job
from tfgpu.launch.link import Link
from tfgpu.launch.local import SUPERVISOR
from tfgpu.launch.screen import Screen

Message = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Work:
    """What every worker runs; sent to all of them.

    Args:
        job: the launch.
        call: the pickled function and its arguments, or None where `job.script` is a file.
        paths: the launching program's module search path, which may exist on the worker's machine too.
        grace_period_s: seconds that workers get to save after a request to stop that no failure caused.
    """

    job: Job
    call: bytes | None = field(default=None, repr=False)
    paths: tuple[str, ...] = ()
    grace_period_s: float = 10.0


def search_paths() -> tuple[str, ...]:
    """This program's module search path, without the standard library and installed packages."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    found = [os.path.abspath(path or ".") for path in sys.path if os.path.exists(path or ".")]
    return tuple(path for path in found if os.path.realpath(path) not in installed and "lib-dynload" not in path)


class Relay:
    """The supervisor of one worker; relays messages between it and the launching program.

    When the engine kills the process that owns this object, the supervisor kills the worker and removes its files.

    Args:
        work: what to run.
        rank: which worker.
        address: the address at which the other workers reach this machine.
        data: the first argument of the function, or None.
        environment: variables that the supervisor and the worker get besides this process's own.
        folders: directories to remove at the end.

    Raises:
        InputError: the log file cannot be written.
    """

    def __init__(
        self,
        work: Work,
        rank: int,
        address: str,
        *,
        data: object = None,
        environment: Mapping[str, str] | None = None,
        folders: Sequence[Path] = (),
    ):
        logs = None if work.job.logs is None else Path(work.job.logs)
        self._screen = Screen([f"worker {rank}"], logs, stderr_only=True)
        self._folder = Path(tempfile.mkdtemp(prefix="tfgpu-worker-"))
        script = work.job.script
        if work.call is not None:
            script = str(pickled.write(self._folder, work.call, data))
        self._facts = {"name": socket.gethostname(), "address": address, "python": sys.executable, "script": script}
        # The engine's process may have search paths that a new Python lacks, such as files sent with the job.
        paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *search_paths(), *work.paths]
        path = os.pathsep.join(dict.fromkeys(path for path in paths if path))
        environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        command = [*SUPERVISOR, "--grace-period=0", str(self._folder), *map(str, folders)]
        self._link = Link("", command, environment=environment)
        self._sending = threading.Lock()  # An actor's methods may run in several threads.

    def fileno(self) -> int:
        """The file descriptor that messages come from."""
        return self._link.messages

    def receive(self) -> list[Message] | None:
        """Waits for messages to the launching program; None: the supervisor has ended."""
        messages = self._link.receive()
        if messages is None:
            sys.stderr.writelines(f"{line}\n" for line in self._link.last_words())
            return None
        return [each for message, data in messages for each in self._pass(message, data)]

    def send(self, do: str, facts: Mapping[str, Any]) -> None:
        """Forwards a message of the launching program to the supervisor."""
        with self._sending:
            self._link.send(do, **facts)

    def close(self) -> None:
        """Ends the supervisor, and with it the worker."""
        self._link.close()
        self._screen.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pass(self, message: dict[str, Any], data: bytes) -> list[Message]:
        event = message["event"]
        if event == "hello":
            return [({**message, **self._facts}, b"")]
        if event == "output" and message["stream"] in (STDOUT, STDERR):
            self._screen.output(0, message["stream"], data)
            return []
        if event == "exit":
            self._screen.finish(0)
            return [*self._remains(message), (message, data)]
        return [(message, data)]

    def _remains(self, message: dict[str, Any]) -> list[Message]:
        """The last lines of a worker that has ended, and its function's result."""
        found = [(STDERR, "".join(f"{line}\n" for line in self._screen.last(0)).encode())]
        if message["code"] == 0:
            with contextlib.suppress(OSError):  # A script returns nothing.
                found.append((RESULT, (self._folder / pickled.RESULT).read_bytes()))
        output = {"event": "output", "id": message["id"]}
        return [({**output, "stream": stream, "bytes": len(data)}, data) for stream, data in found if data]


class EngineLink(ABC):
    """A connection to the supervisor of one worker; `tfgpu.launch.link.Link` is its counterpart over pipes.

    Another thread adds messages; the loop takes them when `messages` is readable.

    Args:
        rank: which worker.
    """

    pings, complaints, hint = False, None, ""

    def __init__(self, rank: int):
        self.rank, self.ended = rank, False
        self.facts: dict[str, Any] | None = None
        self.ports: list[int] | None = None
        self.loss_code = 1
        self.messages = os.eventfd(0, os.EFD_SEMAPHORE)
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._closing, self._is_closed = threading.Lock(), False
        self._words: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """The name of the worker's machine; the worker's name until the machine is known."""
        return f"worker {self.rank}" if self.facts is None else self.facts["name"]

    @property
    def begun(self) -> bool:
        """Whether the supervisor has ever answered."""
        return self.facts is not None

    def put(self, messages: Sequence[Message] | None) -> None:
        """Adds messages from the worker; None: the connection has ended."""
        with self._closing:
            if not self._is_closed:
                self._queue.put(messages)
                os.eventfd_write(self.messages, 1)

    def lose(self, words: Sequence[str], code: int = 1) -> None:
        """Marks the connection as lost.

        Args:
            words: why.
            code: the exit code of the attempt.
        """
        self._words, self.loss_code = tuple(words), code
        self.put(None)

    def receive(self) -> Sequence[Message] | None:
        """Returns the messages that have arrived; None: the connection has ended."""
        os.eventfd_read(self.messages)
        return self._queue.get()

    def last_words(self) -> Sequence[str]:
        """Why the connection was lost."""
        return self._words

    @abstractmethod
    def send(self, do: str, **facts: Any) -> None:
        """Sends a message to the supervisor."""

    def close(self) -> None:
        """Accepts no more messages."""
        with self._closing:
            self._is_closed = True
            os.close(self.messages)
