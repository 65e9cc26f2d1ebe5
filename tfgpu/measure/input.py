"""What limits a training: the input, the model, or the processor that they share; and which setting moves the input.

Three rates say where the time goes: batches that are read and thrown away, the model on one batch that is ready, and
both together. Then each setting of the input that applies is tried for real, in turn with the input as it is.
"""

import contextlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import keras
import numpy as np
import tensorflow as tf

from tfgpu import strategies
from tfgpu.cluster import Cluster
from tfgpu.data import Data, cache
from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples
from tfgpu.data.names import parse_source
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError
from tfgpu.measure.rates import Rate, alternate, check
from tfgpu.recipes import building, facts, runner
from tfgpu.recipes.recipe import Recipe

_WORTH = 1.1  # A setting that gives less than a tenth more is not recommended.
_SHARED = 0.85  # Together slower than this share of the slower one: they get in each other's way.
_SAMPLE_BYTES = 128 << 20  # of decoded examples, to try caches that would take long to fill
_FIRST_STEPS = 8  # steps of the model to judge by how many to measure


@dataclass(frozen=True)
class Trial:
    """One setting of the input that was tried.

    Attributes:
        setting: as one would write it, such as `"cache='memory'"`.
        rate: examples a second that the input made with it.
        ratio: to the input as it is.
        note: what to know about it.
    """

    setting: str
    rate: Rate
    ratio: float
    note: str = ""


@dataclass(frozen=True)
class InputReport:
    """What was measured, in examples a second.

    Attributes:
        recipe: what was measured, as the recipe's own settings.
        input: the input alone.
        model: the model alone, on one batch that is ready.
        together: training.
        bottleneck: `"input"` or `"model"`: the slower of the two.
        shared: the two together are much slower than the slower one: they share the processor.
        trials: the settings that were tried, the best first.
        advice: what to do, in words.
        facts: device, versions and sizes.
    """

    recipe: Recipe
    input: Rate
    model: Rate
    together: Rate
    bottleneck: str
    shared: bool
    trials: tuple[Trial, ...]
    advice: str
    facts: dict[str, object]

    def as_json(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return {
            "examples_per_s": {name: getattr(self, name).facts() for name in ("input", "model", "together")},
            "bottleneck": self.bottleneck,
            "shared": self.shared,
            "advice": self.advice,
            "trials": [
                {"setting": t.setting, "ratio": round(t.ratio, 3), "note": t.note, "examples_per_s": t.rate.facts()}
                for t in self.trials
            ],
            "facts": self.facts,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def measure_input(
    what: Recipe, *, seconds: float = 1.0, repeats: int = 3, progress: Callable[[str], None] = lambda text: None
) -> InputReport:
    """Measures the input, the model, both together, and what each setting of the input would give.

    Args:
        what: the recipe of the training; nothing is written and its model is thrown away.
        seconds: how long each single measurement takes, about.
        repeats: how many there are of each.
        progress: is told what is being measured.

    Returns:
        The rates, the bottleneck and the advice.

    Raises:
        InputError: something in the recipe cannot work, or there are several workers.

    Example:
        >>> found = measure_input(Recipe(model="mlp"), seconds=0.05, repeats=1)
        >>> found.bottleneck in ("input", "model"), found.input.median > 0
        (True, True)
    """
    check(seconds, repeats)
    cluster = runner.check(what, None, resume=False, overwrite=False)
    if cluster.is_multi_worker:
        raise InputError("The input is measured in one process. Received: a cluster. Unset TF_CONFIG.")
    with contextlib.ExitStack() as held:
        held.enter_context(building.prepare(what))
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="tfgpu-input-"))
        progress("opening the data")
        examples = open_source(what.data, _reading(what, what.cache))
        job = building.build(what, cluster, source=examples)
        sample = None if examples.load is None else _sample(examples)
        variants = _variants(what, examples, sample, job.data, cluster)
        progress(f"the input alone, and {len(variants)} settings of it")
        draw = tf.function(_draw)  # One for all: they have the same kinds of batches.
        opened = {"": job.data} | {name: data for name, (data, _) in variants.items()}
        readers = {name: _Reader(data, draw) for name, data in opened.items()}
        for reader in readers.values():
            reader(seconds / 2)  # tf.data finds its numbers, and functions are traced
        rates = alternate({name: lambda r=r: r(seconds) for name, r in readers.items()}, repeats=repeats)
        cold = sample and _cold_disk(what, sample, cluster, folder)
        progress("the model alone")
        model, steps = _model_rate(job, seconds, repeats)
        progress("both together")
        together = _together(job, steps, repeats)
    base = rates.pop("")
    tried = [Trial(name, rate, rate.median / base.median, variants[name][1]) for name, rate in rates.items()]
    tried += [Trial("cache='disk'", cold, cold.median / base.median, _COLD)] if cold else []
    tried.sort(key=lambda trial: -trial.ratio)
    shared = together.median < _SHARED * min(base.median, model.median)
    bottleneck = "input" if base.median < model.median else "model"
    advice = _advice(bottleneck, base, model, together, shared, tried)
    about = _about(job)
    return InputReport(what, base, model, together, bottleneck, shared, tuple(tried), advice, about)


_FILES = ("folder", "records", "tfds")
_COLD = "read from the disk, not from memory; on a sample"
_LESS = "to see what augmentation costs"


def _reading(what: Recipe, kept: str) -> Reading:
    directory = what.cache_directory if kept in ("auto", "disk") else None
    return Reading(what.image_size, what.skip_corrupt, kept, directory, what.memory_bytes, length=what.length)


def _variants(
    what: Recipe, examples: Examples, sample: Examples | None, data: Data, cluster: Cluster
) -> dict[str, tuple[Data, str]]:
    """Opens the data with each setting that may make a difference; the value is the data and a note."""
    found = {}

    def add(name, note="", source=examples, **changes):
        changed = what.model_copy(update={"cache": "auto", "cache_directory": None, **changes})
        found[name] = building.open_data(changed, cluster, source=source), note

    cores = os.cpu_count() or 1
    if sample is not None:
        kept = f"on a sample of {len(sample.labels):,}" if len(sample.labels) < len(examples.labels) else ""
        add("cache='memory'", kept, source=sample, validation=0.0, test=0.0)
    elif parse_source(what.data).kind in _FILES:
        add("cache='none'", source=open_source(what.data, _reading(what, "none")))
    for calls in sorted({1, cores, 2 * cores}):
        if calls != what.parallel_calls:
            add(f"parallel_calls={calls}", parallel_calls=calls)
    for batches in (0, 4):
        if batches != what.prefetch:
            add(f"prefetch={batches}", prefetch=batches)
    if data.info.augment:
        add("augment='none'", _LESS, augment=())
    return found


def _sample(examples: Examples) -> Examples:
    """Decodes as many examples as there is room for, each class in its share, as if all were kept in memory."""
    x = examples.load(tf.constant(0, tf.int64))
    count = min(len(examples.labels), max(1, _SAMPLE_BYTES // (x.dtype.size * math.prod(x.shape))))
    chosen = np.sort(np.random.default_rng(0).permutation(len(examples.labels))[:count])
    decoded = tf.data.Dataset.from_tensor_slices(chosen).map(examples.load, num_parallel_calls=tf.data.AUTOTUNE)
    array = np.stack(list(decoded.as_numpy_iterator()))
    own = {"train": np.arange(count)}
    return replace(
        examples, labels=examples.labels[chosen], array=array, load=None, where=None, copies=np.arange(count), own=own
    )


def _cold_disk(what: Recipe, sample: Examples, cluster: Cluster, folder: str) -> Rate:
    """Reads a cache on the disk once, when it is no longer in memory."""
    with tf.device("CPU:0"):
        array = tf.constant(sample.array)
    where = cache.Place(sample.name, cache.made(what.cache_directory or folder), f".tfgpu-measure-{os.getpid()}")
    try:
        stored = cache.write(where, replace(sample, array=None, load=lambda i: array[i]))
        with open(where.examples, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        changed = what.model_copy(update={"cache": "auto", "cache_directory": None, "validation": 0.0, "test": 0.0})
        data = building.open_data(changed, cluster, source=stored)
        begun = time.perf_counter()
        for _ in data.train:
            pass
        return Rate((data.info.epoch_examples / (time.perf_counter() - begun),))
    finally:
        cache.remove(where)


class _Reader:
    """Reads batches and throws them away, epoch after epoch."""

    def __init__(self, data: Data, draw: Callable):
        self._data, self._draw = data, draw
        self._iterator, self._left, self._count = None, 0, 1

    def __call__(self, seconds: float) -> float:
        """Reads for about so long; returns examples a second."""
        begun, seen = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            if not self._left:
                self._iterator, self._left = iter(self._data.train), self._data.info.steps_per_epoch
            count = min(self._left, self._count)
            seen += int(self._draw(self._iterator, tf.constant(count)))
            self._left -= count
            if time.perf_counter() - begun - passed < seconds / 50:  # Few calls: each costs as much as a small batch.
                self._count *= 2
        return seen / (time.perf_counter() - begun)


def _draw(iterator, count):
    seen = tf.constant(0)
    for _ in tf.range(count):
        seen += tf.shape(next(iterator)[1])[0]
    return seen


class _Clock(keras.callbacks.Callback):
    """Notes how long each epoch takes."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._begun)


def _fit(job: building.Job, dataset: tf.data.Dataset, epochs: int) -> list[float]:
    """Trains for some epochs after one that does not count; returns the seconds of each."""
    clock = _Clock()
    job.trainer.fit(dataset, epochs=epochs + 1, callbacks=[clock], shuffle=False, verbose=0)
    return clock.seconds[1:]


def _model_rate(job: building.Job, seconds: float, repeats: int) -> tuple[Rate, int]:
    """Trains on one batch over and over; returns the rate and the steps of an epoch that takes `seconds`."""
    batch = job.data.peek()
    ready = tf.data.Dataset.from_tensors(batch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    step = _fit(job, ready.repeat(_FIRST_STEPS).with_options(options), 1)[0] / _FIRST_STEPS
    steps = max(_FIRST_STEPS, round(seconds / step))
    count = steps * len(batch[1])
    return Rate(tuple(count / s for s in _fit(job, ready.repeat(steps).with_options(options), repeats))), steps


def _together(job: building.Job, steps: int, repeats: int) -> Rate:
    info = job.data.info
    steps = min(steps, info.steps_per_epoch)
    count = min(steps * info.global_batch, info.epoch_examples)
    return Rate(tuple(count / s for s in _fit(job, job.data.train.take(steps), repeats)))


def _advice(bottleneck: str, base: Rate, model: Rate, together: Rate, shared: bool, tried: list[Trial]) -> str:
    if bottleneck == "model":
        text = f"The model is the bottleneck: the input could feed {base.median / model.median:.1f} of it."
        if shared:
            text += " Together they are slower than either: they share the processor, so a cheaper input helps too."
        else:
            return f"{text} No setting of the input would make training quicker."
    else:
        text = f"The input is the bottleneck: the model waits {1 - base.median / model.median:.0%} of the time."
    best = next((trial for trial in tried if trial.note != _LESS and _clearly_better(trial, base)), None)
    if best:
        return f"{text} {best.setting} makes the input {best.ratio:.1f} times as fast."
    return (
        f"{text} None of the settings tried makes the input a tenth faster: write the examples smaller or decoded, "
        "or give it more processor cores."
    )


def _clearly_better(trial: Trial, base: Rate) -> bool:
    """Says whether a setting gives a tenth more, and more in each measurement than the best without it."""
    return trial.ratio >= _WORTH and min(trial.rate.values) > max(base.values)


def _about(job: building.Job) -> dict[str, object]:
    info, spread = job.data.info, strategies.describe(job.strategy)
    return {
        "strategy": spread["kind"],
        "devices": list(spread["devices"]),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "global_batch": info.global_batch,
        "train_examples": info.train_examples,
        "input_shape": list(info.input_shape),
        "cache": info.cache,
        "augment": [name for name, _ in info.augment],
        "versions": facts.versions(),
    }
