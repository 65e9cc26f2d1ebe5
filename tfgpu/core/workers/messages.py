"""Texts that workers leave for each other about one thing, such as a save, from any thread and without collectives."""

import time

from tfgpu.compat import coordination
from tfgpu.core.workers import ledger
from tfgpu.core.workers.ledger import PROBE_EVERY_S, SLICE_S
from tfgpu.errors import MachineError

_LONGEST = 1 << 18
"""Characters of one text."""


class Messages:
    """The texts about one thing that all workers do.

    Args:
        scope: a name for it that all workers have.

    Raises:
        MachineError: the workers cannot leave texts.
    """

    def __init__(self, scope: str):
        found = ledger.current()
        if found is None:
            raise MachineError(
                "Workers that write or share data need TensorFlow's coordination service, which is off in this "
                "process. Make the strategy with `tfgpu.strategy()`, and do not change TensorFlow's settings of that "
                "service."
            )
        self._ledger, self._scope = found, scope

    def name(self, rank: int) -> str:
        """A worker's name, with its address."""
        return self._ledger.names[rank]

    def put(self, key: str, text: str, seconds: float = coordination.LONGEST_S) -> None:
        """Leaves a text of any length.

        Raises:
            MachineError: the first worker, whose process holds the texts, does not answer, or not within `seconds`.
        """
        if not self._ledger.is_open:
            raise self._unreachable("TensorFlow's coordination service has ended")
        pieces = [text[at : at + _LONGEST] for at in range(0, len(text), _LONGEST)]
        try:
            for at, piece in enumerate(pieces):
                coordination.put(f"{self._scope}/{key}/{at}", piece, seconds)
            coordination.put(f"{self._scope}/{key}/count", str(len(pieces)), seconds)
        except coordination.Unreachable as error:
            raise self._unreachable(error) from error

    def wait(self, key: str, rank: int) -> str:
        """The text that a worker has left, or will leave.

        Raises:
            MachineError: the worker no longer answers.
        """
        count = int(self._wait(f"{key}/count", rank))
        return "".join(self._wait(f"{key}/{at}", rank) for at in range(count))

    def of_all(self, key: str, mine: str) -> list[str]:
        """Every worker's text, in the order of the workers. Every worker must call it, with the same key.

        Raises:
            MachineError: a worker no longer answers.
        """
        self.put(f"{key}/{self._ledger.rank}", mine)
        return [self.wait(f"{key}/{rank}", rank) for rank in range(len(self._ledger.names))]

    def forget(self) -> None:
        """Deletes all texts about it, once all workers have read them."""
        try:
            coordination.delete(self._scope)
        except coordination.Unreachable as error:
            raise self._unreachable(error) from error

    def _wait(self, key: str, rank: int) -> str:
        probed = time.monotonic()
        try:
            while (text := coordination.get(f"{self._scope}/{key}", SLICE_S)) is None:
                if time.monotonic() - probed > PROBE_EVERY_S:
                    probed = time.monotonic()
                    if (lost := self._ledger.lost([rank])) is not None:
                        raise lost
        except coordination.Unreachable as error:
            raise self._unreachable(error) from error
        return text

    def _unreachable(self, error: object) -> MachineError:
        return MachineError(f"{self.name(0)} no longer answers ({error}). Start all workers again.")
