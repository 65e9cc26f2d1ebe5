"""Connections over an engine's own transport: they carry messages from a worker's `Relay` to the launching program."""

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tfgpu.launch.functions.relay import Message


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
