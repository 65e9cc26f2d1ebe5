"""Files that workers without a shared disk send each other: blocks in all-gathers, written to the disk as they come."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpu.core.state import broadcast

_BLOCK = 1 << 22
"""Bytes that each worker sends in one collective."""


def send(
    strategy: tf.distribute.Strategy,
    rank: int,
    senders: Mapping[str, int],
    sizes: Mapping[str, int],
    mine: Mapping[str, Path],
    wanted: Mapping[str, Path],
) -> None:
    """Copies files between workers. Every worker must call it, with the same senders and sizes.

    Args:
        strategy: of the workers.
        rank: this worker's.
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
        outgoing = _read([mine[name] for name in queues.get(rank, ())])
        incoming = {worker: _Files(opened, names, sizes, wanted) for worker, names in queues.items()}
        for _ in range(rounds):
            block = np.zeros(_BLOCK, "uint8")
            try:
                content = next(outgoing, b"") if failed is None else b""
                block[: len(content)] = np.frombuffer(content, "uint8")
            except OSError as error:
                failed = failed or error
            rows = broadcast.blocks_of_all_workers(strategy, block.view("int32"))
            try:
                for worker, files in incoming.items() if failed is None else ():
                    files.take(memoryview(rows[worker]).cast("B"))
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed


def _read(paths: Sequence[Path]) -> Iterator[bytes]:
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
