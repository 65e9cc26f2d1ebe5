"""What an epoch of batches is made of: the examples, their order, and what happens to each batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.core.worker_rows import Ranges
from tfgpu.data import position
from tfgpu.data.augmentation import augment as augmentation
from tfgpu.data.augmentation import stages as augmentations
from tfgpu.data.augmentation.targets import MASKS
from tfgpu.data.examples import Examples, to_model


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

    @property
    def pairs(self) -> int:
        """How many stages mix examples."""
        return getattr(self.change, "pairs", 0)

    def total(self, start: tf.Tensor) -> tf.Tensor:
        """Examples in the batch that begins at the place `start` of the epoch, int64."""
        return tf.minimum(self.count - start, self.global_batch)

    def shard(self, start: tf.Tensor, ranges: Ranges) -> "BatchShard":
        """The worker's shard of that batch."""
        total = self.total(start)
        return BatchShard(total, ranges.indices(total))

    def needed(self, epoch: tf.Tensor, start: tf.Tensor, ranges: Ranges | None) -> tf.Tensor:
        """The rows of the batch to fetch: all, or a worker's own and those that are mixed with them."""
        if ranges is None:
            return tf.range(self.total(start))
        shard = self.shard(start, ranges)
        return shard.rows if self.pairs == 0 else self.change.needed(epoch, start, shard)

    def made(self, epoch: tf.Tensor, start: tf.Tensor, x: tf.Tensor, index: tf.Tensor, ranges: Ranges | None):
        """The batch of the examples `x` at `index`, or `(rows, total)` of one worker."""
        x, labels = to_model(x), tf.gather(self.labels, index)
        if ranges is None:
            return self.change(epoch, start, x, labels)
        shard = self.shard(start, ranges)
        return self.change(epoch, start, x, labels, shard), tf.cast(shard.total, tf.int32)


@dataclass(frozen=True)
class BatchShard:
    """A shard of a batch.

    Attributes:
        total: rows of the batch, int64 scalar.
        rows: which of them are made, int64, in the order in which the worker's devices get them.
    """

    total: tf.Tensor
    rows: tf.Tensor


@dataclass(frozen=True)
class Settings:
    """How training batches are made from examples: the arguments of `load`, with `augment` parsed."""

    global_batch: int
    stages: tuple[tuple[str, dict[str, Any]], ...]
    seed: int
    shuffle: bool
    smoothing: float

    @property
    def soft(self) -> bool:
        """Whether labels are shares of the classes."""
        return augmentations.mixes(self.stages) or self.smoothing > 0


def order(examples: Examples, indices: np.ndarray, settings: Settings) -> tuple[int, Callable]:
    """Returns the number of examples per epoch and the function from an epoch's number to their order."""
    seed = settings.seed
    if examples.blend is not None:
        return examples.blend(indices, seed=seed, shuffle=settings.shuffle)
    indices = position.on_cpu(indices)
    return len(indices), lambda epoch: position.order(indices, seed=seed, epoch=epoch) if settings.shuffle else indices


def gatherer(examples: Examples) -> Callable | None:
    """The function `(x, index)` -> inputs, targets and sample weights; None where those are the examples' classes."""
    if examples.structure is None:
        return None
    gather, planes = examples.structure.gatherer(), examples.structure.planes
    labels = position.on_cpu(examples.labels)

    def named(x, index):
        inputs, targets, weights = gather(index)
        x = x if inputs is None else tf.nest.map_structure(to_model, inputs)
        if planes:  # uint8 that `to_model` has divided by 255, which rounding undoes
            masks = tf.cast(tf.round(x[..., -planes] * 255.0), tf.uint8)
            x, targets = x[..., :-planes], {**targets, MASKS: masks}
        return x, tf.gather(labels, index) if targets is None else targets, weights

    return named


@dataclass(frozen=True)
class Change:
    """What happens to a batch of training examples.

    Attributes:
        settings: the stages and the smoothing.
        classes: the number of classes.
        gather: as `gatherer` returns it.
        trains: False leaves out the stages and the smoothing.
    """

    settings: Settings
    classes: int
    gather: Callable | None = None
    trains: bool = True

    @property
    def stages(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        return self.settings.stages if self.trains else ()

    @property
    def pairs(self) -> int:
        """How many stages mix examples."""
        return sum(name in augmentations.MIXING for name, _ in self.stages)

    def __call__(self, epoch, places, x, y, shard: BatchShard | None = None):
        """Changes a batch, or a shard of it, whose examples are those of the rows `needed`."""
        smoothing = self.settings.smoothing if self.trains else 0.0
        x, y, own = (x, y, None) if self.gather is None else self.gather(x, y)
        y = tf.one_hot(y, self.classes) if self.settings.soft else y
        if self.stages:
            count, rows = (tf.shape(x)[0], None) if shard is None else (shard.total, shard.rows)
            x, y = augmentation.apply(x, y, self.stages, self._numbers(epoch, places, count), rows)
        smooth = y * (1.0 - smoothing) + smoothing / self.classes if smoothing else y
        return (x, smooth) if own is None else (x, smooth, own)

    def needed(self, epoch, place, shard: BatchShard) -> tf.Tensor:
        """The rows of a batch that a shard is made of: its own and their partners, int64."""
        numbers = self._numbers(epoch, place, shard.total)
        return augmentation.needed(self.stages, numbers, shard.rows)

    def _numbers(self, epoch, places, count) -> position.Numbers:
        return position.Numbers(seed=self.settings.seed, epoch=epoch, start=places, count=count)
