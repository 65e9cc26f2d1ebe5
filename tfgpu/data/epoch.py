"""What an epoch of batches is made of: the examples' order, and what happens to each batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.data.assembly.epoch_spec import BatchShard, EpochSpec
from tfgpu.data.augmentation import augment as augmentation
from tfgpu.data.augmentation import stages as augmentations
from tfgpu.data.augmentation.targets import MASKS
from tfgpu.data.examples import Examples, to_model
from tfgpu.data.feed import Feed, batches


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
        return examples.blend.order(indices, seed=seed, shuffle=settings.shuffle)
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
    """

    settings: Settings
    classes: int
    gather: Callable | None = None

    @property
    def pairs(self) -> int:
        """How many stages mix examples."""
        return sum(name in augmentations.MIXING for name, _ in self.settings.stages)

    def __call__(self, epoch, places, x, y, shard: BatchShard | None = None):
        """Changes a batch, or a shard of it, whose examples are those of the rows `needed`."""
        settings, smoothing = self.settings, self.settings.smoothing
        x, y, own = (x, y, None) if self.gather is None else self.gather(x, y)
        y = tf.one_hot(y, self.classes) if settings.soft else y
        if settings.stages:
            count, rows = (tf.shape(x)[0], None) if shard is None else (shard.total, shard.rows)
            x, y = augmentation.apply(x, y, settings.stages, self._numbers(epoch, places, count), rows)
        smooth = y * (1.0 - smoothing) + smoothing / self.classes if smoothing else y
        return (x, smooth) if own is None else (x, smooth, own)

    def needed(self, epoch, place, shard: BatchShard) -> tf.Tensor:
        """The rows of a batch that a shard is made of: its own and their partners, int64."""
        numbers = self._numbers(epoch, place, shard.total)
        return augmentation.needed(self.settings.stages, numbers, shard.rows)

    def _numbers(self, epoch, places, count) -> position.Numbers:
        return position.Numbers(seed=self.settings.seed, epoch=epoch, start=places, count=count)


def fixed(examples: Examples, indices, settings: Settings, feed: Feed) -> tf.data.Dataset | None:
    """Batches a validation or test split in a fixed order; None if it is empty."""
    if not len(indices):
        return None
    classes, gather = len(examples.class_names), gatherer(examples)
    indices = position.on_cpu(indices)

    def change(epoch, places, x, y, shard=None):
        x, y, own = (x, y, None) if gather is None else gather(x, y)
        y = tf.one_hot(y, classes) if settings.soft else y
        return (x, y) if own is None else (x, y, own)

    epochs = tf.data.Dataset.from_tensors(np.int64(0))
    spec = EpochSpec(examples, lambda epoch: indices, len(indices), settings.global_batch, change)
    return batches(spec, epochs, feed)
