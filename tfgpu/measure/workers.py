"""Measures the input of one of several workers: how fast it makes its rows, and what work all workers repeat."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.core import worker_rows
from tfgpu.data import Data, position
from tfgpu.data.examples import Examples
from tfgpu.data.sources import open_source
from tfgpu.errors import whole_number
from tfgpu.measure.input import Reader, about, drawing, reading_of
from tfgpu.measure.rates import Rate, alternate, check
from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe

_COUNTED = 8  # batches whose examples are counted


@dataclass(frozen=True)
class Stage:
    """A stage of the input.

    Attributes:
        name: what happens.
        work: a worker's work over its share of one device's: 1.0 if nothing is done twice, the number of workers if all
            do all of it.
        note: what it costs, or why.
    """

    name: str
    work: float
    note: str


@dataclass(frozen=True)
class WorkersReport:
    """The input of a worker that has a machine of its own.

    Attributes:
        recipe: the measured recipe.
        workers: how many there are.
        alone: examples per second of one device, which makes whole batches.
        worker: examples per second of a worker, of its own rows.
        cpu_us: CPU microseconds per example of one device, `alone`, and of a worker, `worker`.
        stages: what a worker does, and what all do.
        facts: cores, versions and sizes.
    """

    recipe: Recipe
    workers: int
    alone: Rate
    worker: Rate
    cpu_us: dict[str, Rate]
    stages: tuple[Stage, ...]
    facts: dict[str, object]

    @property
    def supply(self) -> float:
        """Examples per second of all workers together."""
        return self.workers * self.worker.median

    def as_json(self) -> dict[str, object]:
        """Returns JSON-compatible values."""
        return {
            "workers": self.workers,
            "examples_per_s": {"alone": self.alone.facts(), "worker": self.worker.facts()},
            "supply_per_s": round(self.supply, 2),
            "cpu_us_per_example": {name: rate.facts() for name, rate in self.cpu_us.items()},
            "stages": [{"stage": s.name, "work": round(s.work, 3), "note": s.note} for s in self.stages],
            "facts": self.facts,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def measure_workers(
    what: Recipe,
    workers: int,
    *,
    seconds: float = 1.0,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> WorkersReport:
    """Measures the input of one of `workers` workers in this process, in turns with the input of one device.

    Args:
        what: the recipe of the training.
        workers: how many workers there would be, with one device each.
        seconds: approximate length of each measurement.
        repeats: the number of measurements of each rate.
        progress: called with the name of the current measurement.

    Returns:
        The rates, and how much of its work each worker shares with the others.

    Raises:
        InputError: the recipe or a number is invalid, the batch has fewer rows than there are workers, or the
            environment has a cluster.

    Example:
        >>> found = measure_workers(Recipe(model="mlp"), 2, seconds=0.05, repeats=1)
        >>> [round(stage.work, 1) for stage in found.stages if stage.name == "read"]
        [1.0]
    """
    check(seconds, repeats)
    whole_number("workers", workers, maximum=what.global_batch)
    runner.check_alone(what, "The input is measured")
    progress("opening the data")
    begun = time.perf_counter()
    examples = open_source(what.data, reading_of(what, what.cache))
    opened_s = time.perf_counter() - begun
    data = building.open_data(what, Cluster(), source=examples)
    own = worker_rows.of(data.train)
    progress("counting what each worker reads")
    read = max(_read_by(what, examples, worker, workers) for worker in range(workers)) * workers
    steps = data.info.steps_per_epoch
    readers = {
        "alone": Reader(data.train, steps, drawing(lambda batch: batch[1])),
        "worker": Reader(own.make(_of(0, workers)), steps, drawing(lambda part: part[0][1])),
    }
    for name, reader in readers.items():
        progress(f"warming up: {name}")
        reader(seconds / 2)
        reader.cpu_us.clear()
    progress("one device and a worker")
    rates = alternate({name: lambda r=r: r(seconds) for name, r in readers.items()}, repeats=repeats)
    cpu_us = {name: Rate(tuple(reader.cpu_us)) for name, reader in readers.items()}
    stages = tuple(_stages(examples, data, workers, read, opened_s))
    return WorkersReport(what, workers, rates["alone"], rates["worker"], cpu_us, stages, about(data.info))


def _of(worker: int, workers: int) -> worker_rows.Ranges:
    return worker_rows.Ranges((worker,), workers)


def _read_by(what: Recipe, examples: Examples, worker: int, workers: int) -> float:
    """The part of an epoch of a few batches that a worker reads, by a counter of what is read."""
    loads: Counter = Counter()
    count = min(len(examples.labels), _COUNTED * what.global_batch)
    changed = {"cache": "auto", "cache_directory": None, "validation": 0.0, "test": 0.0}
    some = _counted(examples, count, loads)
    data = building.open_data(what.model_copy(update=changed), Cluster(), source=some)
    for _ in worker_rows.of(data.train).make(_of(worker, workers)):
        pass
    return loads.total() / count


def _counted(examples: Examples, count: int, loads: Counter) -> Examples:
    """The first examples, each of which records that it is read; nothing is decoded."""
    if examples.load is not None:
        kind = tf.uint8
    else:
        kind = examples.stored().dtype if examples.array is None else tf.as_dtype(examples.array.dtype)

    def load(index):
        def note(i):
            loads[int(i)] += 1
            return np.zeros([], np.uint8)

        noted = tf.cast(tf.numpy_function(note, [index], tf.uint8), kind)
        return tf.fill([1 if side is None else side for side in examples.decoded_shape], noted)

    own = {"train": np.arange(count)}
    return replace(examples, array=None, stored=None, load=load, where=None, encoded=None, copies=None, own=own)


def _stages(examples: Examples, data: Data, workers: int, read: float, opened_s: float):
    info = data.info
    begun = time.perf_counter()
    position.order(tf.range(info.epoch_examples, dtype=tf.int64), seed=0, epoch=tf.constant(0, tf.int64))
    yield Stage("open the source", workers, f"{opened_s:.2f} s, once")
    yield Stage("order", workers, f"{(time.perf_counter() - begun) * 1e3:.1f} ms an epoch; indices alone")
    mixing = [name for name, _ in info.augment if name in ("mixup", "cutmix")]
    partners = f"with the partners of {' and '.join(mixing)}" if mixing else ""
    yield Stage("read" if examples.load is None else "read and decode", read, partners)
    if info.augment:
        yield Stage("draw random numbers", workers, "a few for each row")
        yield Stage("augment", read if mixing else 1.0, "of all rows that are read, at most" if mixing else "")
