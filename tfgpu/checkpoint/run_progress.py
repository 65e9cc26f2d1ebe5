"""How far a run has come, and the data's part in it."""

from typing import Any

import numpy as np

from tfgpu.checkpoint.data_position import DataSource
from tfgpu.checkpoint.storage import Position


class RunProgress:
    """Counts the steps of a run, over interruptions and several `fit`s, and keeps the logs of its epochs.

    Attributes:
        done: steps of the running epoch that are done.
        first: the epoch with which the run began, before any interruption; None until the first epoch of a `fit`.
    """

    def __init__(self):
        self.done = 0
        self.first: int | None = None
        self._history: list[dict[str, Any]] = []  # from epoch `_history_start` on
        self._history_start = 0
        self._earlier_steps = 0  # before the running epoch

    @property
    def step(self) -> int:
        """Steps that are done since the run began."""
        return self._earlier_steps + self.done

    def restore(self, position: Position) -> None:
        """Continues from a checkpoint's position."""
        self._history = [dict(row) for row in position.history]
        self._history_start = position.epoch - len(self._history)
        self._earlier_steps, self.done = position.step - position.done, position.done

    def begin_epoch(self, epoch: int) -> bool:
        """Begins an epoch that was not interrupted. Returns whether it is the first one of this `fit`."""
        self.done = 0
        if self.first is not None:
            return False
        self.first = epoch
        if not self._history_start <= epoch <= self._history_start + len(self._history):
            self._history, self._history_start = [], epoch
        self._history = self._history[: epoch - self._history_start]
        if not self._history:
            self._earlier_steps = 0
        return True

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Ends an epoch."""
        self._history = [*self._history[: epoch - self._history_start], logs]
        self._earlier_steps, self.done = self.step, 0

    def position(self, **facts) -> Position:
        """The position of a checkpoint that is made now; `facts` are further fields of `Position`."""
        facts = {"epoch": self._history_start + len(self._history), "done": self.done, **facts}
        return Position(step=self.step, first=self.first, history=tuple(self._history), **facts)


class DataSeeker:
    """Makes the data begin an epoch by its number, where the data can.

    Args:
        data: the `data` argument of `Checkpoint`, or None.
        source: of the data that `fit` trains on.

    Attributes:
        first_epoch: the number that the data counts for the run's first epoch.
    """

    def __init__(self, data: Any, source: DataSource):
        self._data, self._source = data, source
        self.first_epoch = 0

    @property
    def is_possible(self) -> bool:
        """Whether each epoch can be sought: one stream for all epochs cannot."""
        return not self._source.is_stream and (self._data is not None or self._source.counter is not None)

    def begin(self, epoch: int) -> None:
        """Notes how the data counts `epoch`, the first one of a `fit`."""
        if self._source.counter is not None:
            self.first_epoch = self._source.counter.next - epoch

    def seek(self, epoch: int) -> None:
        """Makes the data's next epoch the one of this number."""
        if self._data is not None:
            self._data.seek(epoch)
        elif self._source.counter is not None:
            self._source.counter.next = self.first_epoch + epoch


def plain_logs(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Logs as a checkpoint keeps them: numbers and arrays.

    Example:
        >>> plain_logs({"loss": np.float32(0.5)})
        {'loss': 0.5}
    """
    values = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {name: float(value) if value.ndim == 0 else value.copy() for name, value in values.items()}
