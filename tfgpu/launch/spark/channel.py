"""A line between the program that launched a Spark job and its tasks: reports and ends come in, a stop goes out.

Spark itself hands back what a task made when the task is over, and stops tasks by killing them.
"""

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from tfgpu.errors import MachineError

STOP, GONE = "stop", "gone"
"""What a desk sends to end a task's process, and what it notes of a task whose line broke."""
_LOOK_S = 0.05


class Desk:
    """The launching program's end.

    Args:
        host: name or address of this machine as the tasks reach it.
        port: where to listen; 0 takes a free one.

    Attributes:
        news: pairs `(rank, message)`; the message is a report, an `Ended`, or `GONE`.
        address, key: what a task needs to connect. Without the key nobody gets a line.
    """

    def __init__(self, host: str, port: int = 0):
        self.key = secrets.token_bytes(32)
        try:
            self._listener = socket.create_server(("", port))
        except OSError as error:
            raise MachineError(
                f"Cannot listen on port {port} for the Spark tasks: {error.strerror}. Give another `driver_port`."
            ) from error
        self.address = (host, self._listener.getsockname()[1])
        self.news: queue.Queue = queue.Queue()
        self._lines: dict[int, Connection] = {}
        self._callers: list[socket.socket] = []
        threading.Thread(target=self._accept, name="tfgpu-desk", daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for caller in self._callers:
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
            caller.close()

    def stop(self) -> None:
        """Asks all tasks to end their processes."""
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.send(STOP)

    def wait(self, seconds: float) -> None:
        """Waits until all tasks are gone, or so long."""
        end = time.monotonic() + seconds
        while self._lines and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the desk is closed
            while True:
                caller = self._listener.accept()[0]
                self._callers.append(caller)
                threading.Thread(target=self._listen, args=(caller,), daemon=True).start()

    def _listen(self, caller: socket.socket) -> None:
        rank = None
        with (
            contextlib.suppress(OSError, EOFError, AuthenticationError),
            Connection(os.dup(caller.fileno())) as line,
        ):
            deliver_challenge(line, self.key)
            answer_challenge(line, self.key)
            rank = line.recv()
            self._lines[rank] = line
            while True:
                self.news.put((rank, line.recv()))
        if rank is not None:
            self._lines.pop(rank, None)
            self.news.put((rank, GONE))


def connected(address: tuple[str, int], key: bytes, rank: int) -> Connection:
    """A task's end of the line.

    Raises:
        MachineError: the launching program cannot be reached.
    """
    try:
        line = Client(tuple(address), authkey=key)
    except OSError as error:
        raise MachineError(
            f"Worker {rank} cannot reach the Spark driver at {address[0]}:{address[1]}: {error}. Set "
            "`spark.driver.host` to a name that the executors can reach, and `driver_port` to a port that is open."
        ) from error
    line.send(rank)
    return line


def follow(line: Connection, child) -> None:
    """Sends what happens to a task's process to the desk, until it has ended or the desk asks for that.

    Args:
        line: of `connected`.
        child: the `Child`; it is stopped on return.
    """
    try:
        while True:
            reports, ended = child.news(wait_s=0.2)
            for report in reports:
                line.send(report)
            if ended is not None:
                line.send(ended)
                return
            if line.poll() and line.recv() == STOP:
                return
    except (OSError, EOFError):  # the launching program is gone
        return
    finally:
        child.stop()
