"""A Spark DataFrame with row numbers, repartitioned so that each worker's rows are one partition."""

import contextlib
from dataclasses import dataclass

from tfgpu.errors import InputError

_AT, _PART, _START, _ROW, _WORKER = (f"__tfgpu_{name}" for name in ("at", "part", "start", "row", "worker"))
_BITS = 33
"""`monotonically_increasing_id` holds the row within its partition in these low bits, and the partition above them."""


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


def to_frame(sql, data):
    """The data as a DataFrame.

    Args:
        sql: the module `pyspark.sql`.
        data: a DataFrame, or an RDD of Rows, dictionaries or tuples.

    Raises:
        InputError: it is neither, or it is a DataFrame of Spark Connect, which has no RDDs and so no barrier tasks.
    """
    from pyspark import RDD

    if isinstance(data, RDD):
        return sql.SparkSession.builder.getOrCreate().createDataFrame(data)
    if not isinstance(data, sql.DataFrame):
        raise InputError(f"`data` must be a Spark DataFrame or RDD. Received: {type(data).__name__}.")
    if "connect" in type(data).__module__:
        raise InputError("Spark Connect's DataFrames are not supported. Run the driver in the cluster.")
    return data


@contextlib.contextmanager
def ordered(frame, seed: int | None):
    """The rows with their row numbers, kept by Spark in memory and on disk while the block runs.

    Args:
        frame: the DataFrame.
        seed: shuffles the rows; None keeps their order.

    Yields:
        The DataFrame with row numbers, and the number of rows in each partition.
    """
    from pyspark.sql import functions as F

    rows = frame.withColumn(_AT, F.monotonically_increasing_id())
    if seed is not None:
        mixed = rows.orderBy(F.xxhash64(F.lit(seed), _AT), _AT)
        rows = mixed.withColumn(_AT, F.monotonically_increasing_id())
    rows = rows.persist()
    try:
        part = F.shiftright(_AT, _BITS)
        yield rows, {row[0]: row[1] for row in rows.groupBy(part).count().collect()}
    finally:
        rows.unpersist()


def repartitioned(rows, counts: dict[int, int], assignment: RowAssignment):
    """Puts each worker's rows into the partition with the worker's number, in order.

    Args:
        rows, counts: what `ordered` yields.
        assignment: which rows each worker gets.

    Returns:
        A DataFrame of `assignment.workers` partitions, with the user's columns.
    """
    from pyspark.sql import functions as F

    spark = rows.sparkSession
    starts, start = [], 0
    for part in sorted(counts):
        starts.append((part, start))
        start += counts[part]
    starts = spark.createDataFrame(starts, f"{_PART} bigint, {_START} bigint")
    rows = rows.withColumn(_PART, F.shiftright(_AT, _BITS)).join(F.broadcast(starts), _PART)
    row = F.col(_START) + F.col(_AT).bitwiseAND((1 << _BITS) - 1)
    rows = rows.withColumn(_ROW, row).withColumn(_WORKER, _key_of_row(spark, assignment))
    rows = rows.repartition(assignment.workers, _WORKER).sortWithinPartitions(_ROW)
    return rows.drop(_AT, _PART, _START, _ROW, _WORKER)


def _key_of_row(spark, assignment: RowAssignment):
    """For each row, the key of its worker: a number that Spark's hash sends to the partition of the worker's number."""
    from pyspark.sql import functions as F

    full = assignment.rows // assignment.global_batch * assignment.global_batch
    last = F.col(_ROW) >= full
    within = F.col(_ROW) % assignment.global_batch
    piece = F.when(last, _piece(F, within, assignment.rows - full, assignment.replicas))
    piece = piece.otherwise(_piece(F, within, assignment.global_batch, assignment.replicas))
    keys = _keys(spark, assignment.workers)
    keys = F.array(*(F.lit(key).cast("bigint") for key in keys))  # the hash depends on the type
    return F.element_at(keys, (piece % assignment.workers + 1).cast("int"))


def _piece(F, within, size: int, replicas: int):
    """Which piece of a batch of `size` rows holds the row at position `within`: the longer pieces come first."""
    each, left = divmod(size, replicas)
    longer = left * (each + 1)
    in_longer = F.floor(within / (each + 1))
    if each == 0:
        return in_longer
    return F.when(within < longer, in_longer).otherwise(left + F.floor((within - longer) / each))


def _keys(spark, workers: int) -> list[int]:
    """For each partition a number that `repartition` sends there."""
    from pyspark.sql import functions as F

    tried = 100
    while True:
        target = F.pmod(F.hash("id"), F.lit(workers))
        found = {row[1]: row[0] for row in spark.range(tried).select("id", target).collect()}
        if len(found) == workers:
            return [found[partition] for partition in range(workers)]
        tried *= 4
