"""Says which stages of a dataset every worker runs, what that costs, and how to share them.

The cost is what TensorFlow's own model of the pipeline has measured, which is there for autotuning anyway. Reading it
reads no data and changes nothing.
"""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat import tensorflow as private
from tfgpu.compat.datasets import Map, StageCost
from tfgpu.core import step_blocks
from tfgpu.core.feed.rewriting import Cut

_log = logging.getLogger(__name__)
BATCHES = 10
"""So many batches are read before the cost of stages is reported; fewer if the run ends."""
_LOOK_S = 0.02
_PASSED = frozenset("prefetch options batch padded_batch repeat take skip assert_cardinality".split())
_PYTHON = (
    "Python makes its batches: a generator, or a PyDataset. To share the work, make a dataset of indices or paths, and "
    "do the work in a `map` after the shuffle"
)
_COSTLY = frozenset("map flat_map interleave filter from_generator scan group_by_window".split())


_UNCOUNTED = frozenset({"root", "prefetch", "shuffle", "shuffle_and_repeat"})
"""TensorFlow counts the time of what they read as their own, too."""
_READING = _UNCOUNTED | frozenset(
    "batch cache filter flat_map group_by_window interleave map padded_batch repeat scan skip take unbatch".split()
)
"""Stages that release their input when they have read all of it. TensorFlow then forgets what the input cost."""
_LEAST = 0.01  # of the time of all stages


class Obstacle(Enum):
    """What every worker must run whole, and with it what comes before; the value says how to change that."""

    ORDER = (
        "It decides which elements come, and when. Put each `map` that changes one element by itself after it: then a "
        "worker runs that on its own elements only"
    )
    STATE = (
        "Its function has state, so it would draw other numbers if it ran less often. Draw with `tf.random.stateless_"
        "uniform` and the like, from a seed that belongs to the element; for Python without state, write "
        "`tf.numpy_function(stateful=False)`"
    )
    ROWS = (
        "Its function is not known to give each row of a batch its own value to the bit. Put it before `batch`, "
        "if it looks at one row at a time"
    )
    LENGTH = (
        "It pads each batch to its longest element, so it needs all elements. With `padded_shapes`, each worker makes "
        "only its own"
    )
    STRUCTURE = "It takes sparse or ragged tensors. Give it plain ones"


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
        stages: names of what every worker runs, the source first (`names`).
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


@dataclass(frozen=True)
class Note:
    """That every worker runs stages of a dataset.

    Attributes:
        dataset: the dataset.
        cut: of it; None if every worker makes all of it.
        obstacle: why the last of the stages is not shared.
    """

    dataset: tf.data.Dataset
    cut: Cut | None
    obstacle: Obstacle

    @property
    def stages(self) -> list[str]:
        """Names of what every worker runs, the source first."""
        return names(self.dataset if self.cut is None else self.cut.base)

    def tell(self, cost: Cost | None = None) -> None:
        """Logs which costly stages every worker runs; nothing if there are none."""
        stages = self.stages
        kinds = [stage.split(" ")[0] for stage in stages]
        if not _COSTLY.intersection(kinds):
            return
        passed = _PASSED - {"padded_batch"} if self.obstacle is Obstacle.LENGTH else _PASSED
        last = max((at for at, kind in enumerate(kinds) if kind not in passed), default=len(kinds) - 1)
        _log.info(
            "Every worker runs these stages of a dataset for all rows: %s.%s The last one that workers cannot share is "
            "`%s`. %s.",
            ", ".join(stages),
            "" if cost is None else f" They take {cost}.",
            stages[last],
            _PYTHON if kinds[last] == "from_generator" else self.obstacle.value,
        )

    def tell_with_cost(self, run: step_blocks.Run) -> None:
        """Logs it when the first batches of a run have been read, with what the stages have cost.

        Args:
            run: that is about to read the dataset.
        """
        _Measuring(self, run)


class _Measuring:
    """Waits for the first batches of a run.

    TensorFlow forgets what a stage's input cost once the stage has read all of it, as `shuffle` over a whole dataset
    has before the first batch. So a thread reads the cost every 20 ms until it is reported.
    """

    def __init__(self, note: Note, run: step_blocks.Run):
        self._note, self._run, self._batches, self._seen = note, run, 0, None
        self._is_told = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tfgpu-costs", daemon=True)
        self._thread.start()
        run.after_block.append(self._after_block)
        run.exits.callback(self._tell)

    def _after_block(self, steps: int, seconds: float) -> None:
        self._batches += steps
        if self._batches >= BATCHES:
            self._tell()

    def _tell(self) -> None:
        if not self._is_told.is_set():
            self._is_told.set()
            self._thread.join()
            self._note.tell(self._cost(self._batches))

    def _look(self) -> None:
        epoch = int(self._note.dataset.cardinality())
        while epoch > 0 and not self._is_told.wait(_LOOK_S):
            self._seen = self._cost(epoch) or self._seen

    def _cost(self, batches: int) -> Cost | None:
        block, note = self._run.block, self._note
        iterator = None if block is None else block.iterator
        data = getattr(iterator, "data", None)
        if getattr(data, "dataset", None) is not note.dataset or not isinstance(iterator.unread, tf.data.Iterator):
            return None
        cut = note.cut if iterator.has_rows else None
        return measure(iterator.unread, batches, cut, note.stages, self._seen)


def names(dataset: tf.data.Dataset) -> list[str]:
    """The stages of a dataset, the source first, with the names of the functions that they call.

    Example:
        >>> names(tf.data.Dataset.range(3).shuffle(3).batch(2))
        ['range', 'shuffle', 'batch']
    """
    if any("GeneratorDataset" in private.operations_of(each.function.graph) for each in private.functions_of(dataset)):
        return ["from_generator"]
    found = [name for source in private.sources_of(dataset) for name in names(source)]
    function = getattr(private.python_function_of_stage(dataset), "__name__", None)
    name = datasets.name_of(dataset)
    return [*found, f"{name} ({function})" if function else name]
