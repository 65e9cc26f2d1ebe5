"""What the batches of an epoch are made of, and the shard of each that a worker makes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import tensorflow as tf

from tfgpu.core.worker_rows import Ranges
from tfgpu.data.examples import Examples


@dataclass(frozen=True)
class EpochSpec:
    """What the batches of an epoch are made of.

    Args:
        examples: what the indices refer to.
        order: maps the epoch's number to the indices of its examples, int64 [count].
        count: examples in an epoch.
        global_batch: examples in a batch.
        change: `(epoch, place, x, y)` -> the batch, and `(epoch, place, x, y, shard)` -> the rows of a shard of it.

    Attributes:
        labels: the examples' labels, a tensor; their numbers, from 0, where `change` gathers arrays by them.
    """

    examples: Examples
    order: Callable[[tf.Tensor], tf.Tensor]
    count: int
    global_batch: int
    change: Callable
    labels: tf.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with tf.device("CPU:0"):
            count, is_plain = len(self.examples.labels), self.examples.structure is None
            labels = tf.constant(self.examples.labels) if is_plain else tf.range(count, dtype=tf.int64)
            object.__setattr__(self, "labels", labels)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-self.count // self.global_batch)

    def total(self, start: tf.Tensor) -> tf.Tensor:
        """Examples in the batch that begins at the place `start` of the epoch, int64."""
        return tf.minimum(self.count - start, self.global_batch)

    def shard(self, start: tf.Tensor, ranges: Ranges) -> "BatchShard":
        """The worker's shard of that batch."""
        total = self.total(start)
        return BatchShard(total, ranges.indices(total))

    def needed(self, epoch: tf.Tensor, start: tf.Tensor, shard: "BatchShard") -> tf.Tensor:
        """The rows of the batch to fetch for the shard."""
        return shard.rows if pairs(self.change) == 0 else self.change.needed(epoch, start, shard)


@dataclass(frozen=True)
class BatchShard:
    """A shard of a batch.

    Attributes:
        total: rows of the batch, int64 scalar.
        rows: which of them are made, int64, in the order in which the worker's devices get them.
    """

    total: tf.Tensor
    rows: tf.Tensor


def pairs(change: Callable) -> int:
    """How many stages mix examples."""
    return getattr(change, "pairs", 0)
