"""Writes checkpoints: every worker its own file, the chief the facts, once all files are on the disks.

Workers agree on a save in the threads that write, not in the training: a checkpoint is complete if every worker has
told the chief that its file is. A worker that fails, or leaves before the save, tells the others.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfgpu import atomic
from tfgpu.checkpoint import manifest, storage, streamed
from tfgpu.checkpoint.disks import Disks
from tfgpu.checkpoint.manifest import FACTS, Position
from tfgpu.compat.coordination import LONGEST_S
from tfgpu.core.state.parts import StateParts
from tfgpu.core.workers.messages import Messages
from tfgpu.errors import MachineError

_FAREWELL_S = 2.0  # in which a failed script tells the others, before it reports its error


class _Left(Exception):
    """A worker does not take part in this save: its training has ended, or it cannot."""


class PartsWriter:
    """Writes the checkpoints of one run. Several workers write together, each with one of these.

    As a context manager around the training: if the block fails, the other workers do not wait for this one's part of
    the next save. Enter it before the writer whose thread runs the jobs, which then ends first.

    Args:
        directory: where this worker's go.
        disks: of the workers.
    """

    def __init__(self, directory: Path, disks: Disks):
        self._directory, self._disks, self._number = directory, disks, 0

    def job(
        self, position: Position, saved: StateParts, memory: Any, prune: Callable[[Path], None]
    ) -> Callable[[], None]:
        """Makes a function that writes one checkpoint. All workers make and run the same jobs in the same order.

        Args:
            position: how far the run has come.
            saved: this worker's part of the state.
            memory: the chief's; the other workers' is ignored.
            prune: called with the checkpoint's folder when it is on all disks.

        Returns:
            A function for any thread. It raises OSError or MachineError if the checkpoint could not be written.
        """
        path = self._directory / position.name

        def write() -> None:
            self._number += 1  # counts jobs that run, not one that Ctrl-C keeps from being handed over
            if self._disks.count == 1:
                storage.write(path, position, saved, memory)
                prune(path)
            elif _Save(path, self._disks, self._number).write(position, saved, memory):
                prune(path)

        return write

    def no_job(self, position: Position) -> Callable[[], None]:
        """Replaces a job on a worker that cannot make it; then no worker writes that checkpoint."""

        def skip() -> None:
            self._number += 1
            if self._disks.count > 1:
                _Save(self._directory / position.name, self._disks, self._number).skip()

        return skip

    def __enter__(self) -> "PartsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or not self._disks.writes or self._disks.count == 1:
            return
        with contextlib.suppress(MachineError):  # the others find out that this one is gone
            _Save(self._directory / "none", self._disks, self._number + 1).leave(_FAREWELL_S)


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
        self._last = Messages(_scope(disks, number - 1))

    def write(self, position: Position, saved: StateParts, memory: Any) -> bool:
        """Writes it; returns whether this worker renames and removes folders on its disk."""
        disks = self._disks
        try:
            facts = self._write_own(position, saved, memory)
            if not disks.is_leader:
                return False
            text = self._text(facts) if disks.is_chief else self._heard("facts", 0)
            if disks.is_chief:  # last, so that a checkpoint on the chief's disk is on all disks
                for leader in sorted(set(disks.leaders) - {0}):
                    self._heard(f"done/{leader}", leader)
            self._put(text)
            self._heard("done/0", 0)  # the older ones stay until then
            return True
        except _Left:
            self.leave()
            return False
        except BaseException as error:
            kind = "" if isinstance(error, MachineError) else f"{type(error).__name__}: "
            self._tell_instead({"error": f"{kind}{error}"})
            raise
        finally:
            if disks.is_leader:
                self._clear()

    def leave(self, seconds: float = LONGEST_S) -> None:
        """Tells the others that there will be no such checkpoint."""
        self._tell_instead({"left": True}, seconds)

    def skip(self) -> None:
        """Takes no part, and removes what the others of this disk write aside."""
        self.leave()
        if self._disks.is_leader:
            self._wait_for_parts()
            atomic.remove(self._aside)

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
        """The content of the file of facts, which the chief sends to the other disks."""
        count = self._disks.count
        files = {manifest.file_name(rank, count): self._heard(f"part/{rank}", rank) for rank in range(count)}
        self._last.forget()  # all write this save, so they have read the messages about the last one
        text = manifest.text_of(facts, files).decode()
        if len(set(self._disks.leaders)) > 1:
            self._messages.put("facts", _said(text))
        return text

    def _put(self, text: str) -> None:
        (self._aside / FACTS).write_bytes(text.encode())
        if (self._path / FACTS).is_file() and (self._path / FACTS).read_bytes() == text.encode():
            # On a slow network disk, another worker did not see this one's folder, and was first.
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
        if "left" in found:
            raise _Left
        if "error" in found:
            raise MachineError(f"{self._messages.name(rank)}: {found['error']}")
        return found["value"]

    def _tell_instead(self, what: dict[str, Any], seconds: float = LONGEST_S) -> None:
        """Tells the workers that wait for this one why it will not write; messages already sent stay."""
        keys = [f"part/{self._disks.rank}", f"done/{self._disks.rank}"]
        with contextlib.suppress(MachineError):  # the first error says more
            for key in [*keys, "facts"] if self._disks.is_chief else keys:
                self._messages.put(key, json.dumps(what), seconds)

    def _clear(self) -> None:
        """Removes the temporary folder, once no worker of this disk writes there any more."""
        if self._aside.exists():
            self._wait_for_parts()
            atomic.remove(self._aside)

    def _wait_for_parts(self) -> None:
        """Waits until each worker of this disk has written its part, or says that it will not."""
        for rank in self._disks.members:
            with contextlib.suppress(MachineError):  # the worker is gone
                self._messages.wait(f"part/{rank}", rank)


def _scope(disks: Disks, number: int) -> str:
    return f"save/{disks.token}/{number}"


def _said(value: Any) -> str:
    return json.dumps({"value": value})
