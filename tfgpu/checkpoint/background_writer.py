"""The background writer: writes files in order in one thread, and reports every error."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from tfgpu.errors import MachineError, whole_number

_log = logging.getLogger(__name__)


class Writer:
    """Writes files in a background thread, in the order of the `put` calls.

    Hand over data that no longer changes, such as copied arrays. An error is logged immediately and raised by the next
    `put` or `wait`; later files are still written. If too many writes are pending, `put` waits, so a slow disk slows
    the training down instead of filling the memory. The thread exists only while there is something to write, and
    Python does not exit before it ends: a failed training loses nothing that it has handed over.

    As a context manager it waits at the end and raises the error of a failed write. If the block itself failed, that
    error is raised, with a note about the failed write.

    Args:
        most: how many writes may be pending.

    Attributes:
        is_led: whether a `Checkpoint` raises the errors, on all workers; other callbacks then raise none.

    Raises:
        InputError: `most` is not an integer of at least 1.

    Example:
        >>> with Writer() as writer:
        ...     writer.put("notes.txt", lambda: Path("notes.txt").write_text("done"))
        >>> Path("notes.txt").read_text()
        'done'
    """

    def __init__(self, *, most: int = 2):
        self._most = whole_number("most", most)
        self._jobs: deque[tuple[str, Callable[[], object]]] = deque()
        self._failed: list[tuple[str, BaseException]] = []
        self._changed = threading.Condition()
        self._is_running = self.is_led = False

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Inside the block, only the callback that leads raises this writer's errors; others that share it do not."""
        self.is_led = True
        try:
            yield
        finally:
            self.is_led = False

    @property
    def has_failed(self) -> bool:
        """Whether a write has failed since the last error was raised."""
        with self._changed:
            return bool(self._failed)

    def put(self, what: str | Path, write: Callable[[], object], *, raises: bool = True) -> None:
        """Hands over one write.

        Args:
            what: the file or folder, for the error message.
            write: writes it; called in the thread.
            raises: whether to raise the error of an earlier write. If not, `wait` or a later `put` does.

        Raises:
            MachineError: an earlier write has failed. This one is still done.
        """
        failed: list[tuple[str, BaseException]] = []
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) < self._most)
            if raises:
                failed, self._failed = self._failed, []
            self._jobs.append((str(what), write))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="tfgpu-writer").start()
        _raise_first(failed)

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            MachineError: a write has failed since the last error was raised.
        """
        _raise_first(self._finish())

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            _raise_first(self._finish())
        except MachineError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    def _finish(self) -> list[tuple[str, BaseException]]:
        """Waits for the last write; returns the failures since the last error was raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            failed, self._failed = self._failed, []
        return failed

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                what, write = self._jobs.popleft()
                self._changed.notify_all()
            try:
                write()
            except BaseException as error:  # the next write must run after any error
                _log.error("Writing %s failed: %s: %s", what, type(error).__name__, error)
                with self._changed:
                    self._failed.append((what, error))


def _raise_first(failed: list[tuple[str, BaseException]]) -> None:
    if failed:
        what, error = failed[0]
        more = f" So did {len(failed) - 1} more." if len(failed) > 1 else ""
        raise MachineError(
            f"Writing {what} failed: {type(error).__name__}: {error}.{more} "
            "Free space or grant write access there, or choose another directory."
        ) from error
