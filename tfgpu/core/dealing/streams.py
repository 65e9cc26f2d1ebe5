"""One pass over data whose batches one worker makes for all.

The worker that makes a batch sends each other worker its rows, at most some batches before they are taken. So a worker
that is slow makes the others wait, and none fills its memory.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfgpu.compat import coordination
from tfgpu.core.dealing import batches
from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.links import Inbox, Links
from tfgpu.core.worker_rows import Ranges
from tfgpu.core.workers import sentences
from tfgpu.core.workers.ledger import PROBE_EVERY_S, SLICE_S, Ledger
from tfgpu.errors import InputError, MachineError

_log = logging.getLogger(__name__)
AHEAD = 2
"""Batches of one maker that wait for a worker to take them."""
_REASON_S = 8.0
"""Seconds in which the reason comes why another worker has left."""


class Closed(Exception):
    """Nobody reads any more."""


class Failed(Exception):
    """A batch cannot be made.

    Args:
        batch: which.
        text: what happened, one line.
        of_machine: it may be otherwise another time.
        traceback: of the error.
    """

    def __init__(self, batch: int, text: str, of_machine: bool, traceback: str):
        super().__init__(batch, text, of_machine, traceback)
        self.batch, self.text, self.of_machine, self.traceback = batch, text, of_machine, traceback


class Source(Protocol):
    """Where a worker's own batches come from: an iterator that raises `Failed`."""

    def __next__(self) -> object:
        """The next batch."""

    def close(self) -> None:
        """Ends what makes batches ahead; called from another thread."""


@dataclass(frozen=True)
class StreamSpec:
    """What all workers know of a stream: who makes which batches, and which rows each gets.

    Attributes:
        name: of the data, for errors.
        layout: of a batch.
        ranges: each worker's rows, by rank.
        makers: workers that make batches in turn, from the first rank on.
    """

    name: str
    layout: Layout
    ranges: Sequence[Ranges]
    makers: int


class Stream:
    """One pass.

    Args:
        links: to the other workers.
        key: a name for the pass that all workers have, and no other pass.
        spec: what all workers know of it.
        source: this worker's own batches; None if it makes none.
    """

    def __init__(self, links: Links, key: tuple, spec: StreamSpec, source: Source | None):
        self.links, self.key, self.spec, self._source = links, key, spec, source
        self._inbox, self._rank, self._is_closed = links.inbox(key), links.rank, False
        self._thread = threading.Thread(target=self._make, name="tfgpu-dealing", daemon=True)
        if source is not None:
            self._thread.start()

    def read(self) -> Iterator[tuple[object, np.ndarray]]:
        """This worker's rows of batch after batch, and each batch's number of rows.

        Raises:
            InputError, MachineError: a batch cannot be made, or a worker that makes some is gone.
        """
        try:
            for at in itertools.count():
                header, found = self._take(at)
                if header["kind"] == "end":
                    return
                if header["kind"] == "failed":
                    raise (MachineError if header["of_machine"] else InputError)(header["text"])
                if isinstance(found, np.ndarray):
                    found = self.spec.layout.read(header["shapes"], found)
                yield self.spec.layout.packed(found), np.int32(header["total"])
        finally:
            self.close()

    def close(self) -> None:
        """Ends the pass on this worker."""
        with self._inbox.changed:
            was_closed, self._is_closed = self._is_closed, True
            self._inbox.changed.notify_all()
        if was_closed:
            return
        self.links.tell(self.key, "closed")
        if self._source is not None:
            self._source.close()
            if self._thread is not threading.current_thread():
                self._thread.join()
        self.links.close(self.key)

    def _take(self, at: int) -> tuple[dict, object]:
        maker = at % self.spec.makers
        wait(self.links, self._inbox, maker, lambda: (maker, at) in self._inbox.items, lambda: self._is_closed)
        with self._inbox.changed:
            found = self._inbox.items.pop((maker, at))
            self._inbox.took[self._rank] = at
            self._inbox.changed.notify_all()
        if maker != self._rank:
            self.links.send(maker, self.key, "took", at)
        return found

    def _make(self) -> None:
        others = [rank for rank in range(self.links.workers) if rank != self._rank]
        for at in itertools.count(self._rank, self.spec.makers):
            try:
                arrays, header = self._made()
            except Closed:
                return
            if arrays is None:
                for rank in others:
                    self.links.send(rank, self.key, at=at, **header)
                self._inbox.put(self._rank, {**header, "at": at}, np.empty(0))
                return
            for rank in [*others, self._rank]:
                if not self._has_room(rank, at):
                    continue
                rows = batches.taken(arrays, self.spec.ranges[rank], header["total"])
                if rank == self._rank:
                    self._inbox.put(rank, {**header, "at": at}, rows)
                else:
                    shapes, blocks = batches.blocks(rows)
                    self.links.send(rank, self.key, at=at, blocks=blocks, shapes=shapes, **header)
            if self._is_closed:
                return

    def _made(self) -> tuple[list[np.ndarray] | None, dict]:
        """Returns the next batch, or None at the end, and the frame header."""
        if self._is_closed:
            raise Closed
        try:
            arrays = self.spec.layout.arrays(next(self._source))
            return arrays, {"kind": "rows", "total": batches.rows_of(arrays)}
        except StopIteration:
            return None, {"kind": "end"}
        except Failed as error:
            if self._is_closed:
                raise Closed from None
            _log.error("Batch %d of `%s` cannot be made.\n%s", error.batch, self.spec.name, error.traceback)
            text = f"Batch {error.batch} of `{self.spec.name}` cannot be made on {self.links.ledger.name}: {error.text}"
            return None, {"kind": "failed", "text": text, "of_machine": error.of_machine}
        except Exception as error:  # what a user's generator or class has given may be anything
            _log.debug("What `%s` gives is no batch.", self.spec.name, exc_info=True)
            said = str(error).splitlines() or [type(error).__name__]
            text = f"`{self.spec.name}` on {self.links.ledger.name}: {said[0]}"
            return None, {"kind": "failed", "text": text, "of_machine": False}

    def _has_room(self, rank: int, at: int) -> bool:
        """Waits until a worker has taken what was made before; returns False if it takes no more."""
        step, inbox = self.spec.makers, self._inbox
        with inbox.changed:
            while not self._is_closed and rank not in inbox.gone:
                if at <= inbox.took.get(rank, self._rank - step) + AHEAD * step:
                    return True
                inbox.changed.wait(SLICE_S)
        return False


def wait(links: Links, inbox: Inbox, rank: int, ready: Callable[[], bool], is_closed: Callable[[], bool]) -> None:
    """Waits for something from a worker.

    Args:
        links: to the other workers.
        inbox: where it comes.
        rank: of the worker that sends it.
        ready: whether it is there.
        is_closed: whether nobody wants it any more.

    Raises:
        Closed: nobody does.
        InputError, MachineError: the worker is gone, or the workers do different things.
    """
    probed = time.monotonic()
    while True:
        with inbox.changed:
            if not ready() and not is_closed() and rank not in inbox.gone:
                inbox.changed.wait(SLICE_S)
            if ready():
                return
            if is_closed():
                raise Closed
            is_gone = rank in inbox.gone
        if is_gone:
            raise _why_gone(links.ledger, rank)
        error = links.ledger.failure if links.ledger.is_aborted else None
        if error is None and time.monotonic() - probed > PROBE_EVERY_S:
            error, probed = _asked(links.ledger, rank), time.monotonic()
        if error is not None:
            raise error


def _asked(kept: Ledger, rank: int) -> MachineError | None:
    """The error if a worker's server does not answer."""
    return kept.lost([rank]) if rank != kept.rank else None


def _why_gone(kept: Ledger, rank: int) -> Exception:
    """The error for a worker that has closed its connection: what it did instead, or that it is lost."""
    until = time.monotonic() + _REASON_S
    try:
        while time.monotonic() < until:
            if kept.is_aborted and kept.failure is not None:
                return kept.failure
            if (news := kept.news()) is not None:
                return sentences.apart(*news, kept.name, kept.here())
            if (lost := _asked(kept, rank)) is not None:
                return lost
            time.sleep(SLICE_S / 4)
    except coordination.Unreachable:
        return kept.gone(0)
    return MachineError(f"{kept.names[rank]} no longer sends its part of the data. Start all workers again.")
