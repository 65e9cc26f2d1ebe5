"""Finds which workers write to the same disk: each makes a folder, and looks for those of the others."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpu.checkpoint import storage
from tfgpu.checkpoint.fetching import fail_together
from tfgpu.compat import distribute
from tfgpu.core import collectives, replication
from tfgpu.errors import MachineError

_log = logging.getLogger(__name__)
_PROBE = ".epoch-probe"


@dataclass(frozen=True)
class Disks:
    """The disks of the workers that save together.

    Attributes:
        rank: this worker's number; worker 0 is the chief.
        leaders: for each worker, the first one that writes to the same disk. It renames and removes folders there.
        token: a name that all workers share, and that no earlier run has used.
        writes: whether anything is saved.
    """

    rank: int
    leaders: Sequence[int]
    token: str
    writes: bool

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self.leaders)

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the facts."""
        return self.rank == 0 and self.writes

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the first one on its disk."""
        return self.leaders[self.rank] == self.rank

    @property
    def members(self) -> list[int]:
        """The workers that write to this one's disk."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank]]


def compare(strategy: tf.distribute.Strategy, directory: Path, *, is_chief: bool | None = None) -> Disks:
    """Prepares a folder for checkpoints on every worker's disk; on several workers, each must call it.

    Removes what a killed process left half written, and restores what it was about to replace.

    Args:
        strategy: of the model that is trained.
        directory: where this worker's checkpoints go.
        is_chief: whether this worker writes the facts; None asks the strategy. If none does, nothing is saved.

    Raises:
        MachineError: a directory cannot be written.
    """
    if not replication.spans_processes(strategy):
        writes = is_chief is not False
        if writes:
            _prepare(directory, f"{_PROBE}.{secrets.token_hex(4)}")
            storage.sweep(directory)
        return Disks(0, (0,), "", writes)
    rank, count = distribute.worker_index(strategy), distribute.num_workers(strategy)
    is_chief = strategy.extended.should_checkpoint if is_chief is None else is_chief
    chiefs, number = collectives.sum_over_workers(strategy, [is_chief, secrets.randbits(60) * (rank == 0)])
    token = f"{number:x}"
    if not chiefs:
        return Disks(rank, (0,) * count, token, False)
    what = f"Using {directory} for checkpoints"
    probes = [directory / f"{_PROBE}.{token}-{at}" for at in range(count)]
    fail_together(strategy, lambda: _prepare(directory, probes[rank].name), what)
    seen = fail_together(strategy, lambda: [at for at, probe in enumerate(probes) if probe.is_dir()], what)
    leaders = np.zeros(count, "int64")
    leaders[rank] = min(seen)
    found = Disks(rank, tuple(map(int, collectives.sum_over_workers(strategy, leaders))), token, True)
    fail_together(strategy, lambda: storage.sweep(directory) if found.is_leader else None, what)
    if found.is_chief:
        _tell(found, directory)
    return found


def _prepare(directory: Path, probe: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / probe).mkdir()
    except OSError as error:
        raise MachineError(
            f"Checkpoints cannot be written to {directory}: {error}. Grant write access there, free space, or "
            "choose another directory."
        ) from error


def _tell(found: Disks, directory: Path) -> None:
    disks = len(set(found.leaders))
    if disks > 1:
        _log.warning(
            "%s is on %d separate disks of %d workers, and resuming will need all of them. Use a shared disk if "
            "machines can be replaced.",
            directory,
            disks,
            found.count,
        )
    elif found.count > 1:
        _log.info("All %d workers write their parts of each checkpoint to %s, on one disk.", found.count, directory)
