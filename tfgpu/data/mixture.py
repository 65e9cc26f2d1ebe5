"""Mixtures: several sources in one epoch, each with its share, as a function of seed and place.

An epoch has a fixed number of examples of each source. A source with more examples than its share contributes others
in the next epoch; one with fewer begins its next pass within the epoch. Each pass over a source is shuffled separately,
so over time each of its examples is read equally often. The seed and the epoch determine which example is at which
place, so a mixture resumes like any other source.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.data.examples import Examples
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError, is_number, whole_number


@dataclass(frozen=True)
class Mixture:
    """Sources with weights; made by `mixture`.

    Attributes:
        sources: what `load` takes.
        weights: the share of each, in the same order; they add up to 1.
        epoch_examples: the training examples of an epoch; None: as many as the sources have together.
    """

    sources: tuple[Any, ...] = field(repr=False)
    weights: tuple[float, ...]
    epoch_examples: int | None = None


def mixture(
    sources: Mapping[Any, float] | Sequence[tuple[Any, float]], *, epoch_examples: int | None = None
) -> Mixture:
    """Mixes training examples of several sources by weight, for `load`.

    Batches hold examples of all sources in random order (with `shuffle=False`, spread evenly). An epoch has the same
    number of each source's examples each time: its weight's share, rounded so that they add up. Validation and test
    parts are those of all sources, one after the other, without weights.

    Args:
        sources: names, URLs or paths with their weights, `{"shards/web": 0.7, "shards/books": 0.3}`; or pairs
            `[((x, y), 2), (other, 1)]` for arrays and other sources that cannot be keys. Weights are above 0 and need
            not add up to 1. All examples have one shape and dtype, and the same classes.
        epoch_examples: the training examples of an epoch. Default: as many as the sources have together.

    Returns:
        A source for `load`.

    Raises:
        InputError: no sources, or a weight that is not a number above 0.

    Example:
        >>> from tfgpu.data.batches import load
        >>> zeros, ones = (np.zeros([30, 2]), [0, 1] * 15), (np.ones([10, 2]), [0, 1] * 5)
        >>> data = load(mixture([(zeros, 1), (ones, 1)]), global_batch=8, validation=0, test=0)
        >>> [float(sum(tf.reduce_sum(x) / 2 for x, y in data.train)) for epoch in range(2)]
        [20.0, 20.0]
    """
    pairs = list(sources.items()) if isinstance(sources, Mapping) else list(sources)
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise InputError("A mixture needs sources with weights: {'web/': 0.7, 'books/': 0.3}, or pairs of them.")
    for _, weight in pairs:
        if not is_number(weight) or weight <= 0:
            raise InputError(f"A weight of a mixture must be a number above 0. Received: {weight!r}.")
    if epoch_examples is not None:
        whole_number("epoch_examples", epoch_examples)
    total = sum(weight for _, weight in pairs)
    return Mixture(tuple(source for source, _ in pairs), tuple(weight / total for _, weight in pairs), epoch_examples)


def blended(mix: Mixture, starts: Sequence[int], indices: np.ndarray, *, seed: int, shuffle: bool):
    """The number of examples in an epoch, and the function from an epoch's number to their indices.

    Args:
        mix: with the share of each source.
        starts: the number of each source's first example, and the total of all examples.
        indices: int64, the training examples of all sources.
        seed: the run's seed.
        shuffle: False keeps the order of each source.

    Raises:
        InputError: a source has no training examples.
    """
    limits = zip(starts, starts[1:], strict=False)
    parts = [indices[(indices >= low) & (indices < high)] for low, high in limits]
    empty = [str(at + 1) for at, part in enumerate(parts) if not len(part)]
    if empty:
        raise InputError(f"Source {', '.join(empty)} of the mixture has no training examples. Remove it.")
    # The examples of each source: the shares of all, by largest remainder.
    exact = np.array(mix.weights) * (mix.epoch_examples or len(indices))
    counts = np.floor(exact + 1e-9).astype(np.int64)
    short = round(exact.sum()) - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    parts = [position.on_cpu(part) for part in parts]
    evenly = np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n]), kind="stable")

    def order(epoch: tf.Tensor) -> tf.Tensor:
        epoch = tf.cast(epoch, tf.int64)
        found = [
            _pass_of(part, int(count), epoch, seed, at if shuffle else None)
            for at, (part, count) in enumerate(zip(parts, counts, strict=True))
            if count
        ]
        together = tf.concat(found, 0)
        return position.order(together, seed=seed, epoch=epoch) if shuffle else tf.gather(together, evenly)

    return int(counts.sum()), order


def _pass_of(part: tf.Tensor, count: int, epoch: tf.Tensor, seed: int, number: int | None) -> tf.Tensor:
    """The `count` examples that an epoch takes from a source; it continues where the last epoch ended."""
    size = int(part.shape[0])
    first = epoch * count
    passes = [first // size + at for at in range((count - 1) // size + 2)]
    if number is None:
        each = [part] * len(passes)
    else:
        own = int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1
        each = [position.order(part, seed=own, epoch=one) for one in passes]
    return tf.concat(each, 0)[first % size :][:count]


def joined(mix: Mixture, opened: Sequence[Examples]) -> Examples:
    """The examples of all sources of a mixture as one source.

    Raises:
        InputError: examples of different shapes, dtypes or classes.
    """
    first, sizes = opened[0], [len(each.labels) for each in opened]
    for other in opened[1:]:
        for what, mine, others in (
            ("shape", first.shape, other.shape),
            ("classes", first.class_names, other.class_names),
            ("dtype", first.dtype, other.dtype),
            ("labels of shape", first.labels.shape[1:], other.labels.shape[1:]),
        ):
            if mine != others:
                raise InputError(
                    f"All sources of a mixture must have the same {what}. Received: {mine} in {first.name}, "
                    f"{others} in {other.name}."
                )
    starts = np.concatenate([[0], np.cumsum(sizes)])
    pairs = list(zip(opened, starts.tolist(), strict=False))
    own = {part: [start + each.own[part] for each, start in pairs if part in each.own] for part in PARTS}
    facts = {
        "structure": _structure(opened),
        "name": "+".join(each.name for each in opened),
        "labels": np.concatenate([each.labels for each in opened]),
        "shape": first.shape,
        "class_names": first.class_names,
        "own": {part: np.concatenate(numbers) for part, numbers in own.items() if numbers},
        "skipped": tuple(name for each in opened for name in each.skipped),
        "blend": functools.partial(blended, replace(mix, sources=()), starts.tolist()),
    }
    if all(each.array is not None for each in opened):
        return Examples(array=np.concatenate([each.array for each in opened]), **facts)
    if any(each.ahead is not None for each in opened):
        facts["ahead"] = _ahead(opened, starts)
    where = _chosen(opened, starts, _place) if any(each.where is not None for each in opened) else None
    return Examples(load=_chosen(opened, starts, Examples.example), where=where, **facts)


def _structure(opened: Sequence[Examples]):
    """What an example of any source consists of; None for an image or a text with one label."""
    structures = [each.structure for each in opened]
    if any(each is None for each in structures) and any(each is not None for each in structures):
        raise InputError("All sources of a mixture must have the same structure: classes, numbers, names or weights.")
    try:
        return None if structures[0] is None else structures[0].joined(*structures[1:])
    except (ValueError, TypeError) as error:
        raise InputError(f"All sources of a mixture must have the same structure: {error}.") from error


def _ahead(opened: Sequence[Examples], starts: np.ndarray):
    """Begins to fetch examples of the sources that are far away."""

    def ahead(indices: tf.Tensor) -> tf.Tensor:
        begun = [
            tf.size(each.ahead(tf.boolean_mask(indices, (indices >= low) & (indices < high)) - low))
            for each, low, high in zip(opened, starts, starts[1:], strict=False)
            if each.ahead is not None
        ]
        return tf.add_n(begun)

    return ahead


def _chosen(opened: Sequence[Examples], starts: np.ndarray, function):
    """Calls the function with the source that an index belongs to, and its index there."""
    ends = position.on_cpu(starts[1:])

    def call(index: tf.Tensor) -> tf.Tensor:
        which = tf.reduce_sum(tf.cast(index >= ends, tf.int32))
        pairs = zip(opened, starts, strict=False)
        return tf.switch_case(
            which, [lambda each=each, start=start: function(each, index - start) for each, start in pairs]
        )

    return call


def _place(examples: Examples, index: tf.Tensor) -> tf.Tensor:
    if examples.where is not None:
        return examples.where(index)
    return tf.strings.join([examples.name, tf.strings.as_string(index)], " ")
