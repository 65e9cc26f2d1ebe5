"""Writes checkpoints: every worker its own file, the chief the facts, once all files are on the disks."""

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfgpu import atomic
from tfgpu.checkpoint import manifest, storage, streamed
from tfgpu.checkpoint.disks import Disks
from tfgpu.checkpoint.manifest import FACTS, Position
from tfgpu.core.state.parts import StateParts
from tfgpu.core.workers.messages import Messages
from tfgpu.errors import MachineError


class Agreement:
    """Lets threads write only if all workers have got as far as this one.

    As a context manager: the block is what may fail on some worker, and then fails on all.

    Args:
        is_open: there is nobody to agree with.
    """

    def __init__(self, *, is_open: bool = False):
        self._is_made, self._decided = is_open, threading.Event()
        if is_open:
            self._decided.set()

    def wait(self) -> bool:
        """Whether to write; waits until that is known."""
        self._decided.wait()
        return self._is_made

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._is_made |= kind is None
        self._decided.set()


class PartsWriter:
    """Writes the checkpoints of one run. Several workers write together, each with one of these.

    Args:
        directory: where this worker's go.
        disks: of the workers.
    """

    def __init__(self, directory: Path, disks: Disks):
        self._directory, self._disks, self._number = directory, disks, 0

    def job(
        self, position: Position, saved: StateParts, memory: Any, prune: Callable[[Path], None]
    ) -> Callable[[], None]:
        """What writes one checkpoint, for any thread. All workers make and run the same jobs, in one order.

        Args:
            position: how far the run has come.
            saved: this worker's part of the state.
            memory: of the chief; the other workers' is ignored.
            prune: called with the checkpoint's folder when it is on all disks.

        Returns:
            A function that raises OSError or MachineError if the checkpoint could not be written.
        """
        self._number += 1
        path = self._directory / position.name

        def write() -> None:
            if self._disks.count == 1:
                storage.write(path, position, saved, memory)
                prune(path)
            elif _Save(path, self._disks, number).write(position, saved, memory):
                prune(path)

        number = self._number
        return write


class _Save:
    """One checkpoint of several workers.

    Args:
        path: its folder on this worker's disk.
        disks: of the workers.
        number: of the save.
    """

    def __init__(self, path: Path, disks: Disks, number: int):
        self._path, self._disks = path, disks
        self._aside = path.with_name(f".{path.name}.{disks.token}-{number}")
        self._messages = Messages(_scope(disks, number))
        self._before_last = Messages(_scope(disks, number - 2))

    def write(self, position: Position, saved: StateParts, memory: Any) -> bool:
        """Writes it; returns whether this worker renames and removes folders on its disk."""
        disks = self._disks
        if disks.is_chief:
            self._before_last.forget()  # all have written the last, so they have read what was said before it
        try:
            facts = self._write_own(position, saved, memory)
            if not disks.is_leader:
                return False
            text = self._text(facts) if disks.is_chief else self._heard("facts", 0)
            if disks.is_chief:  # last: a checkpoint that the chief's disk has is on all disks
                for leader in sorted(set(disks.leaders) - {0}):
                    self._heard(f"done/{leader}", leader)
            self._put(text)
            self._heard("done/0", 0)  # the older ones stay until then
            return True
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            if disks.is_leader:
                self._clear()

    def _write_own(self, position: Position, saved: StateParts, memory: Any) -> dict[str, Any]:
        facts = {}
        if self._disks.is_chief:
            facts, more = manifest.facts_of(position, memory, saved)
            saved.own.extend(more)
        self._aside.mkdir(parents=True, exist_ok=True)
        name = manifest.file_name(self._disks.rank, self._disks.count)
        self._messages.put(f"part/{self._disks.rank}", _said(streamed.write(self._aside / name, saved.own)))
        return facts

    def _text(self, facts: dict[str, Any]) -> str:
        """The content of the facts' file, which the chief tells the other disks."""
        count = self._disks.count
        files = {manifest.file_name(rank, count): self._heard(f"part/{rank}", rank) for rank in range(count)}
        text = manifest.text_of(facts, files).decode()
        if len(set(self._disks.leaders)) > 1:
            self._messages.put("facts", _said(text))
        return text

    def _put(self, text: str) -> None:
        (self._aside / FACTS).write_bytes(text.encode())
        if (self._path / FACTS).is_file() and (self._path / FACTS).read_bytes() == text.encode():
            # A worker that could not see this one's folder, on a slow network disk, was first.
            for file in self._aside.iterdir():
                atomic.put(file, self._path / file.name)
        else:
            atomic.put(self._aside, self._path)
        self._messages.put(f"done/{self._disks.rank}", _said(None))

    def _heard(self, key: str, rank: int) -> Any:
        """What a worker has said.

        Raises:
            MachineError: it has failed, or no longer answers.
        """
        found = json.loads(self._messages.wait(key, rank))
        if "error" in found:
            raise MachineError(f"{self._messages.name(rank)}: {found['error']}")
        return found["value"]

    def _tell_failure(self, error: BaseException) -> None:
        """Tells those that wait for this worker; what it has said already stays."""
        said = json.dumps({"error": str(error) if isinstance(error, MachineError) else f"{_kind(error)}: {error}"})
        keys = [f"part/{self._disks.rank}", f"done/{self._disks.rank}"]
        with contextlib.suppress(MachineError):  # the first error says more
            for key in [*keys, "facts"] if self._disks.is_chief else keys:
                self._messages.put(key, said)

    def _clear(self) -> None:
        """Removes what is left aside, once no worker of this disk writes there any more."""
        if not self._aside.exists():
            return
        for rank in self._disks.members:
            try:
                self._messages.wait(f"part/{rank}", rank)
            except MachineError:
                continue  # it is gone
        atomic.remove(self._aside)


def _scope(disks: Disks, number: int) -> str:
    return f"save/{disks.token}/{number}"


def _said(value: Any) -> str:
    return json.dumps({"value": value})


def _kind(error: BaseException) -> str:
    return type(error).__name__
