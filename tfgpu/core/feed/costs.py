"""What the stages of a running tf.data iterator cost, as TensorFlow's own model of the pipeline has measured.

The model is there for autotuning anyway. Reading it reads no data and changes nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat.datasets import Map, StageCost
from tfgpu.core.feed.rewriting import Cut

_UNCOUNTED = frozenset({"root", "prefetch", "shuffle", "shuffle_and_repeat"})
"""TensorFlow counts the time of what they read as their own, too."""
_READING = _UNCOUNTED | frozenset(
    "batch cache filter flat_map group_by_window interleave map padded_batch repeat scan skip take unbatch".split()
)
"""Stages that release their input when they have read all of it. TensorFlow then forgets what the input cost."""
_LEAST = 0.01


@dataclass(frozen=True)
class Cost:
    """What every worker's stages took.

    Attributes:
        batch_ms: milliseconds a batch, of all threads together.
        share: of the time of all stages.
        largest: those that took most, with milliseconds a batch.
    """

    batch_ms: float
    share: float
    largest: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        told = ", ".join(f"{name} {cost_ms:.3g} ms" for name, cost_ms in self.largest)
        return f"{self.batch_ms:.3g} ms a batch, {self.share:.0%} of the time of this worker's input ({told})"


def measure(
    iterator: tf.data.Iterator, batches: int, cut: Cut | None, stages: Sequence[str], seen: Cost | None = None
) -> Cost | None:
    """What the stages before the cut have cost so far; None if TensorFlow does not know.

    Args:
        iterator: that reads.
        batches: so many were read.
        cut: of the dataset; None if every worker makes all of it.
        stages: names of what every worker runs, the source first (`notes.names`).
        seen: their cost per batch, measured shortly before the last of them had read all.
    """
    nodes, top = datasets.costs_of(iterator)
    base = _base(nodes, top, cut)
    if base is None or not batches:
        return None
    everywhere, total = _counted(nodes, base), _counted(nodes, top)
    spent, whole = (sum(node.seconds for node in found) for found in (everywhere, total))
    if any(_kind(nodes[at]) in _READING and not nodes[at].inputs for at in _numbers(nodes, base)):
        others_ms = 1e3 * (whole - spent) / batches
        return seen and replace(seen, share=seen.batch_ms / (seen.batch_ms + others_ms))
    if not spent:
        return None
    named: dict[str, float] = {}
    for name, node in _named(everywhere, stages):
        named[name] = named.get(name, 0.0) + node.seconds
    largest = sorted(named.items(), key=lambda pair: -pair[1])[:3]
    told = tuple((name, 1e3 * each / batches) for name, each in largest if each > _LEAST * whole)
    return Cost(1e3 * spent / batches, spent / whole, told)


def _base(nodes: dict[int, StageCost], top: int, cut: Cut | None) -> int | None:
    """The number of the last stage that every worker runs."""
    if cut is None:
        return top
    if cut.have_rows is None:
        number, kind = 1, "window"
    else:
        number, kind = sum(isinstance(stage, Map) for stage in cut.stages), "map"
    found = [at for at in _numbers(nodes, top) if _kind(nodes[at]) == kind]
    inputs = nodes[found[number - 1]].inputs if len(found) >= number else ()
    return inputs[0] if inputs else None


def _numbers(nodes: dict[int, StageCost], at: int) -> Iterator[int]:
    """A stage's number and those of all that it reads from."""
    if at in nodes:
        yield at
        for each in nodes[at].inputs:
            yield from _numbers(nodes, each)


def _counted(nodes: dict[int, StageCost], at: int) -> list[StageCost]:
    """A stage and all that it reads from, the source first, but for those whose time is not theirs alone."""
    found = [nodes[number] for number in _numbers(nodes, at)]
    return [node for node in reversed(found) if _kind(node) not in _UNCOUNTED]


def _kind(node: StageCost) -> str:
    return datasets.snake_case(re.sub(r"V\d+$", "", node.name)).removeprefix("parallel_")


def _named(nodes: Sequence[StageCost], stages: Sequence[str]) -> Iterator[tuple[str, StageCost]]:
    """Stages with their names, and those of their functions where TensorFlow has merged no stages of that kind."""
    for kind in sorted({_kind(node) for node in nodes}):
        alike = [node for node in nodes if _kind(node) == kind]
        names = [stage for stage in stages if stage.split(" ")[0].removeprefix("from_") == kind]
        if len(names) != len(alike):
            names = [kind] * len(alike)
        yield from zip(names, alike, strict=True)
