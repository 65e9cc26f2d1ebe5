"""Reads a checkpoint. Several workers read it together: if one fails, all fail.

On several workers the chief's folder says which checkpoints there are. Each worker tells which of a checkpoint's files
its disk has. Workers that see the same disk share the work of verifying them, and get files that it lacks from others.
Then each worker reads the slices that it needs.
"""

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfgpu.checkpoint import data_position, lora, storage, streamed
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.manifest import FACTS, Manifest, parse
from tfgpu.checkpoint.storage import Damaged, Snapshot
from tfgpu.compat import distribute
from tfgpu.core import collectives, replication
from tfgpu.core.state import broadcast, training_state
from tfgpu.errors import InputError, MachineError

_log = logging.getLogger(__name__)
_BLOCK = 1 << 22  # bytes that each worker sends in one collective
_Result = TypeVar("_Result")


def fetch(strategy: tf.distribute.Strategy, directory: Path, *, best: Best | None = None) -> Snapshot | None:
    """Returns the newest undamaged checkpoint. On several workers, each must call it; the chief's folder decides.

    Args:
        strategy: of the model that gets it.
        directory: where the checkpoints are.
        best: take the checkpoint of the best epoch instead of the newest.

    Raises:
        InputError: all checkpoints are damaged.
        MachineError: another worker could not read.
    """
    if not replication.spans_processes(strategy) or distribute.num_workers(strategy) == 1:
        try:
            newest = storage.newest(directory)
            return storage.read(directory / _best_name(newest, best)) if best and newest else newest
        except Damaged as error:
            raise InputError(str(error)) from error
    group = _Readers(strategy, directory)
    newest = group.newest()
    if newest is None or best is None:
        return newest
    try:
        return group.read(_best_name(newest, best))
    except Damaged as error:
        raise InputError(f"{directory / _best_name(newest, best)} is damaged: {error}.") from error


def load(read: Snapshot, model: keras.Model) -> None:
    """Gives a model and its optimizer the state of a checkpoint, except for the metrics.

    The metrics' variables may not exist before the first step.

    Raises:
        InputError: the checkpoint belongs to another model or optimizer.
    """
    data_position.build(model)
    arrays = {name: value for name, value in read.arrays.items() if not name.startswith("metrics/")}
    source = str(read.position.directory)
    training_state.restore_state(model, arrays, source, absent=lora.check(read.memory, model, source))


def fail_together(strategy: tf.distribute.Strategy, act: Callable[[], _Result], what: str) -> _Result:
    """Runs `act` on this worker; if it fails on one worker, it fails on all. On several workers, each must call it.

    Otherwise the others would wait in their next collective for a worker that has left. Returns when all are done.

    Args:
        strategy: of the model that is trained.
        act: what this worker does.
        what: its name, for the error on the workers that did not fail themselves.

    Raises:
        MachineError: it failed on another worker. A worker where it failed raises its own error.
    """
    if not replication.spans_processes(strategy):
        return act()
    failed, result = None, None
    try:
        result = act()
    except Exception as error:
        failed = error
    (count,) = collectives.sum_over_workers(strategy, [failed is not None])
    if failed is not None:
        raise failed
    if count:
        raise MachineError(f"{what} failed on another worker. See that worker's error.")
    return result


def _best_name(newest: Snapshot, best: Best) -> str:
    epoch = best.epoch(newest.position)
    if epoch is None:
        raise InputError(f"{newest.position.directory} has no best epoch: its logs lack the metric that `best` names.")
    return storage.Position(epoch).name


@dataclass(frozen=True)
class _Held:
    """What a worker has of a checkpoint: the files on its disk, and a name that only this disk has."""

    disk: str
    files: tuple[str, ...]


class _Readers:
    """The workers that read a checkpoint together; each makes the same calls.

    Args:
        strategy: of the workers.
        directory: of this worker's checkpoints.
    """

    def __init__(self, strategy: tf.distribute.Strategy, directory: Path):
        self._strategy, self._directory = strategy, directory
        self._rank = distribute.worker_index(strategy)

    def newest(self) -> Snapshot | None:
        """The newest undamaged checkpoint, or None if the chief has none; the chief warns of damaged ones."""
        mine = json.dumps([path.name for path in storage.found(self._directory)])
        names = json.loads(self._texts(mine)[0])
        for name in names:
            try:
                return self.read(name)
            except Damaged as error:
                if self._rank == 0:
                    path = self._directory / name
                    _log.warning("Checkpoint %s is damaged (%s); using the previous one.", path, error)
        if names:
            raise InputError(
                f"All checkpoints in {self._directory} are damaged. Choose another directory, or empty this one to "
                "start over."
            )
        return None

    def read(self, name: str) -> Snapshot:
        """Verifies one checkpoint and opens it.

        Raises:
            Damaged: it cannot be read, or is not what was written; on all workers.
        """
        path = self._directory / name
        manifest = self._facts(path)
        held = [_Held(disk, tuple(files)) for disk, files in map(json.loads, self._texts(self._mine(path, manifest)))]
        good, reasons = self._verified(path, manifest, held)
        for file in manifest.files:
            if not any(file in good[each.disk] for each in held):
                raise Damaged(reasons.get(file, f"{file} is missing"))
        lacking = [[file for file in manifest.files if file not in good[each.disk]] for each in held]
        with contextlib.ExitStack() as stack:
            paths = {file: path / file for file in manifest.files}
            if any(lacking):
                wanted = lacking[self._rank]
                folder = stack.enter_context(self._room(name)) if wanted else None
                paths |= {file: folder / file for file in wanted}
                senders = self._senders(manifest, held, good, lacking)
                self._receive(path, manifest, senders, {file: paths[file] for file in wanted})
            # Open files stay readable after they are removed.
            return fail_together(self._strategy, lambda: manifest.open(path, paths), f"Reading {path}")

    def _facts(self, path: Path) -> Manifest:
        """The chief's facts about a checkpoint, on all workers."""
        manifest, reason = None, b""
        if self._rank == 0:
            try:
                manifest = storage.read_facts(path)
            except Damaged as error:
                reason = str(error).encode()
        reason = broadcast.bytes_from_chief(self._strategy, reason)
        if reason:
            raise Damaged(reason.decode())
        text = broadcast.bytes_from_chief(self._strategy, manifest.text if manifest else b"")
        return manifest or parse(text)

    def _mine(self, path: Path, manifest: Manifest) -> str:
        """What this worker has, as JSON. Files that belong to other facts do not count."""
        disk, files = f"none {self._rank}", []
        with contextlib.suppress(OSError):
            known = (path / FACTS).stat()
            if (path / FACTS).read_bytes() == manifest.text:
                disk = f"{known.st_ino} {known.st_ctime_ns}"  # the same for all machines that see this file
                files = [name for name in manifest.files if (path / name).is_file()]
        return json.dumps([disk, files])

    def _verified(self, path: Path, manifest: Manifest, held: list[_Held]) -> tuple[dict[str, set], dict[str, str]]:
        """The undamaged files of each disk, and what is wrong with others. A disk's workers verify it by turns."""
        mine = held[self._rank]
        here = [rank for rank, each in enumerate(held) if each.disk == mine.disk]
        turn, reasons = here.index(self._rank), {}
        for file in mine.files[turn :: len(here)]:
            if (reason := storage.why_not_whole(path / file, manifest.files[file])) is not None:
                reasons[file] = reason
        good = {each.disk: set(each.files) for each in held}
        known: dict[str, str] = {}
        for each, text in zip(held, self._texts(json.dumps(reasons)), strict=True):
            found = json.loads(text)
            good[each.disk] -= found.keys()
            known |= found
        return good, known

    def _senders(self, manifest: Manifest, held: list[_Held], good: dict, lacking: list) -> dict[str, int]:
        """For each file that a disk lacks, a worker that has it and sends little else."""
        load = [0] * len(held)
        senders = {}
        for file in sorted({file for files in lacking for file in files}):
            rank = min((r for r, each in enumerate(held) if file in good[each.disk]), key=load.__getitem__)
            load[rank] += manifest.files[file].size or 0
            senders[file] = rank
        return senders

    def _receive(self, path: Path, manifest: Manifest, senders: dict[str, int], wanted: dict[str, Path]) -> None:
        """Gets files from workers that have them, and verifies them."""
        mine = {file: path / file for file, rank in senders.items() if rank == self._rank}
        found = self._texts(json.dumps({file: where.stat().st_size for file, where in mine.items()}))
        sizes = {file: size for text in found for file, size in json.loads(text).items()}
        if self._rank == 0:
            _log.info("%s: %d bytes go to workers whose disks lack them.", path, sum(sizes.values()))

        def receive() -> None:
            self._send(senders, sizes, mine, wanted)
            for file, where in wanted.items():
                if streamed.hash_of(where) != manifest.files[file].sha256:
                    raise MachineError(f"{file} of {path} was damaged in transfer. Start again.")

        fail_together(self._strategy, receive, f"Getting the files of {path}")

    def _send(
        self, senders: Mapping[str, int], sizes: Mapping[str, int], mine: Mapping[str, Path], wanted: Mapping[str, Path]
    ) -> None:
        """Copies files between workers: blocks in all-gathers, written to the disk as they come.

        Args:
            senders: for each file, the worker that has it and sends it.
            sizes: of each file, in bytes.
            mine: where this worker has files that it sends.
            wanted: where it writes files that it receives.

        Raises:
            OSError: a file could not be read or written; the other workers go on.
        """
        queues = {worker: [name for name in senders if senders[name] == worker] for worker in set(senders.values())}
        rounds = max((-(-sum(sizes[name] for name in names) // _BLOCK) for names in queues.values()), default=0)
        failed = None
        with contextlib.ExitStack() as opened:
            outgoing = _blocks([mine[name] for name in queues.get(self._rank, ())])
            incoming = {worker: _Files(opened, names, sizes, wanted) for worker, names in queues.items()}
            for _ in range(rounds):
                block = np.zeros(_BLOCK, "uint8")
                try:
                    content = next(outgoing, b"") if failed is None else b""
                    block[: len(content)] = np.frombuffer(content, "uint8")
                except OSError as error:
                    failed = failed or error
                rows = broadcast.blocks_of_all_workers(self._strategy, block.view("int32"))
                try:
                    for worker, files in incoming.items() if failed is None else ():
                        files.take(memoryview(rows[worker]).cast("B"))
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def _room(self, name: str):
        """A folder for other workers' files: beside the checkpoints, or a temporary one if that cannot be written."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self._directory))
        except OSError:
            folder = Path(tempfile.mkdtemp())
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _texts(self, mine: str) -> list[str]:
        return broadcast.texts_of_all_workers(self._strategy, mine)


def _blocks(paths: Sequence[Path]) -> Iterator[bytes]:
    """The files' content, one after the other, in blocks."""
    left = b""
    for path in paths:
        with open(path, "rb") as file:
            while content := file.read(_BLOCK - len(left)):
                left += content
                if len(left) == _BLOCK:
                    yield left
                    left = b""
    if left:
        yield left


class _Files:
    """What one worker sends: files one after the other, of which this worker writes those that it wants."""

    def __init__(self, opened: contextlib.ExitStack, names: list[str], sizes: Mapping, wanted: Mapping[str, Path]):
        self._left = [
            [sizes[name], opened.enter_context(open(wanted[name], "wb")) if name in wanted else None] for name in names
        ]

    def take(self, block: memoryview) -> None:
        while len(block) and self._left:
            size, file = self._left[0]
            part, block = block[:size], block[size:]
            if file is not None:
                file.write(part)
            self._left[0][0] -= len(part)
            if not self._left[0][0]:
                self._left.pop(0)
                if file is not None:
                    file.close()
