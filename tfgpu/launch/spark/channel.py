"""The connections between the program that launched a Spark job and its tasks.

Spark itself returns a task's result only when the task is over, and stops tasks by killing them.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from tfgpu.errors import MachineError
from tfgpu.launch.functions.relay import EngineLink

GONE = "Its Spark task is gone: the executor was lost or the task was killed."
_LOOK_S = 0.05


class SparkLink(EngineLink):
    """The connection to a worker's supervisor over a socket of its task, once the task has started."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self._sending, self._line = threading.Lock(), None
        self._early: list[tuple[str, dict[str, Any]]] = []

    def serve(self, line: Connection) -> None:
        """Takes the task's messages until its connection ends."""
        try:
            with self._sending:
                self._line = line
                for message in self._early:
                    line.send(message)
            while True:
                self.put(line.recv())
        except (OSError, EOFError):
            self.lose([GONE])
        finally:
            with self._sending:
                self._line = None

    @property
    def is_served(self) -> bool:
        """Whether the task is connected."""
        return self._line is not None

    def send(self, do: str, **facts: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # The end of its messages reveals a lost task.
            if self._line is None:
                self._early.append((do, facts))
            else:
                self._line.send((do, facts))


class TaskListener:
    """Where the tasks connect to the launching program.

    Args:
        host: name or address at which the tasks reach this machine.
        links: the connection of each worker.
        port: TCP port to listen on; 0 takes a free port.

    Attributes:
        address, key: what a task needs to connect. Without the key no connection is accepted.
    """

    def __init__(self, host: str, links: Sequence[SparkLink], port: int = 0):
        self.key = secrets.token_bytes(32)
        try:
            self._listener = socket.create_server(("", port))
        except OSError as error:
            why = f"Cannot listen on port {port} for the Spark tasks: {error.strerror}."
            raise MachineError(f"{why} Give another `driver_port`.") from error
        self.address = (host, self._listener.getsockname()[1])
        self._links, self._callers = links, []
        threading.Thread(target=self._accept, name="tfgpu-listener", daemon=True).start()

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

    def wait(self, seconds: float) -> None:
        """Waits until all tasks are gone, but no longer than that."""
        end = time.monotonic() + seconds
        while any(link.is_served for link in self._links) and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                caller = self._listener.accept()[0]
                self._callers.append(caller)
                threading.Thread(target=self._listen, args=(caller,), daemon=True).start()

    def _listen(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError), Connection(os.dup(caller.fileno())) as line:
            deliver_challenge(line, self.key)
            answer_challenge(line, self.key)
            self._links[line.recv()].serve(line)


def connected(address: tuple[str, int], key: bytes, rank: int) -> Connection:
    """A task's end of its connection.

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


def relay(line: Connection, worker) -> None:
    """Relays messages between the launching program and a worker's `Relay` until one of them ends.

    Args:
        line: the connection from `connected`.
        worker: the `Relay`; it is closed on return.
    """
    try:
        while True:
            ready = wait([line, worker])
            if worker in ready:
                messages = worker.receive()
                if messages is None:
                    return
                line.send(messages)
            if line in ready:
                worker.send(*line.recv())
    except (OSError, EOFError):  # The launching program is gone.
        return
    finally:
        worker.close()
