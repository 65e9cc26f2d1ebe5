"""Which worker gets which rows of Spark's data: the rows that `fit` would give it from each batch.

Batch b is rows b * global_batch to (b + 1) * global_batch in the data frame's order, whatever the number of workers.
Its pieces, one per replica, differ by at most one row, the longer ones first. Device d of worker w trains on piece
d * workers + w, as everywhere in tfgpu (`core.replication.shard_index`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowAssignment:
    """How rows are divided among workers.

    Args:
        rows: number of rows of the whole data.
        global_batch: rows of a batch, over all replicas.
        workers: number of processes.
        devices: number of devices per worker.

    Example:
        >>> assignment = RowAssignment(rows=10, global_batch=5, workers=2)
        >>> [assignment.piece(1, at) for at in range(2)], assignment.rows_of(0)
        ([(5, 3), (8, 2)], 6)
    """

    rows: int
    global_batch: int
    workers: int
    devices: int = 1

    @property
    def replicas(self) -> int:
        """Number of devices of all workers."""
        return self.workers * self.devices

    @property
    def batches(self) -> int:
        """Batches per epoch, the same for all workers; the last may be smaller."""
        return -(-self.rows // self.global_batch)

    def size(self, batch: int) -> int:
        """Rows of batch number `batch`."""
        return min(self.global_batch, self.rows - batch * self.global_batch)

    def piece(self, batch: int, at: int) -> tuple[int, int]:
        """First row of piece `at` of a batch, counted in the whole data, and its number of rows."""
        each, left = divmod(self.size(batch), self.replicas)
        return batch * self.global_batch + at * each + min(at, left), each + (at < left)

    def pieces_of(self, worker: int) -> list[int]:
        """The numbers of a worker's pieces in each batch, in order."""
        return [device * self.workers + worker for device in range(self.devices)]

    def rows_of(self, worker: int, batches: int | None = None) -> int:
        """How many rows a worker gets from all batches, or from the first `batches`."""
        batches = self.batches if batches is None else batches
        whole, own = min(batches, self.rows // self.global_batch), self.pieces_of(worker)
        count = whole * sum(self.piece(0, at)[1] for at in own) if whole else 0
        return count + sum(self.piece(batch, at)[1] for batch in range(whole, batches) for at in own)
