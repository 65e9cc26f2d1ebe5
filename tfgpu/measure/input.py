"""Finds out whether the input, the model or the CPU that they share limits a training, and which input setting helps.

Three rates are measured: the input alone, the model alone on one prepared batch, and both together. Then each
applicable setting of the input is measured, alternating with the current settings.
"""

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu import strategies
from tfgpu.cluster import Cluster
from tfgpu.core import iterator_end
from tfgpu.data import Data
from tfgpu.data.batches import Info
from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples
from tfgpu.data.names import parse_source
from tfgpu.data.sources import open_source
from tfgpu.measure.rates import Rate, alternate, check
from tfgpu.recipes import building, facts, runner
from tfgpu.recipes.recipe import Recipe


class Reader:
    """Reads and discards batches, epoch after epoch.

    Args:
        dataset: the batches; one iteration is an epoch.
        steps: batches in an epoch.
        draw: `(iterator, count)` -> the number of examples in the next `count` batches, a tf.function.

    Attributes:
        cpu_us: CPU microseconds of this process per example, of each call.
    """

    def __init__(self, dataset: tf.data.Dataset, steps: int, draw: Callable):
        # Iterators end in threads: TensorFlow may take half a minute for each.
        self._data, self._steps, self._draw = iterator_end.Data(dataset), steps, draw
        self._iterator, self._left, self._count = None, 0, 1
        self.cpu_us: list[float] = []

    def __call__(self, seconds: float) -> float:
        """Reads for about this long; returns examples per second."""
        begun, cpu, seen = time.perf_counter(), time.process_time(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            if not self._left:
                self._iterator, self._left = iter(self._data), self._steps
            count = min(self._left, self._count)
            seen += int(self._draw(self._iterator, tf.constant(count)))
            self._left -= count
            if time.perf_counter() - begun - passed < seconds / 50:  # A call costs as much as a small batch.
                self._count *= 2
        self.cpu_us.append((time.process_time() - cpu) / seen * 1e6)
        return seen / (time.perf_counter() - begun)


def drawing(labels: Callable) -> Callable:
    """A function for `Reader`, where `labels(batch)` has a row for each example.

    Readers of batches of the same shapes can share one, which is traced once.
    """

    @tf.function
    def draw(iterator, count):
        seen = tf.constant(0)
        for _ in tf.range(count):
            seen += tf.shape(labels(next(iterator)))[0]
        return seen

    return draw


_WORTH = 1.1  # the least speedup to recommend a setting
_SHARED = 0.85  # input and model compete for the CPU if both together reach less than this share of the slower one
_SAMPLE_BYTES = 128 << 20  # size of the decoded sample for measuring caches that would take long to fill
_FIRST_STEPS = 8  # steps that determine how many steps to measure


@dataclass(frozen=True)
class Trial:
    """A measured setting of the input.

    Attributes:
        setting: as in a recipe, such as `"cache='memory'"`.
        rate: examples per second of the input with this setting.
        ratio: relative to the current settings.
        note: a remark about the measurement.
    """

    setting: str
    rate: Rate
    ratio: float
    note: str = ""


@dataclass(frozen=True)
class InputReport:
    """Measured rates in examples per second.

    Attributes:
        recipe: the measured recipe.
        input: the input alone.
        model: the model alone, on one prepared batch.
        together: training.
        bottleneck: `"input"` or `"model"`, whichever is slower.
        shared: whether both together are much slower than the slower one, because they compete for the CPU.
        trials: the measured settings, the best first.
        advice: what to do, as text.
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
        """Returns JSON-compatible values."""
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
    """Measures the input, the model, both together, and the effect of each setting of the input.

    Args:
        what: the recipe of the training; nothing is written, and its model is discarded.
        seconds: approximate length of each measurement.
        repeats: the number of measurements of each rate.
        progress: called with the name of the current measurement.

    Returns:
        The rates, the bottleneck and the advice.

    Raises:
        InputError: the recipe is invalid, or there are several workers.

    Example:
        >>> found = measure_input(Recipe(model="mlp"), seconds=0.05, repeats=1)
        >>> found.bottleneck in ("input", "model"), found.input.median > 0
        (True, True)
    """
    check(seconds, repeats)
    cluster = runner.check_alone(what, "The input is measured")
    with contextlib.ExitStack() as held:
        held.enter_context(building.prepare(what))
        progress("opening the data")
        examples = open_source(what.data, reading_of(what, what.cache))
        job = building.build(what, cluster, source=examples)
        sample = None if examples.load is None else _sample(examples)
        variants = _variants(what, examples, sample, job.data, cluster)
        progress(f"the input alone, and {len(variants)} settings of it")
        draw = drawing(lambda batch: batch[1])
        opened = {"": job.data} | {name: data for name, (data, _) in variants.items()}
        readers = {name: Reader(data.train, data.info.steps_per_epoch, draw) for name, data in opened.items()}
        for reader in readers.values():
            reader(seconds / 2)  # warm-up: tf.data tunes itself, and functions are traced
        rates = alternate({name: lambda r=r: r(seconds) for name, r in readers.items()}, repeats=repeats)
        progress("the model alone")
        model, steps = _model_rate(job, seconds, repeats)
        progress("both together")
        info = job.data.info
        steps = min(steps, info.steps_per_epoch)
        count = min(steps * info.global_batch, info.epoch_examples)
        together = Rate(tuple(count / s for s in epoch_times(job, job.data.train.take(steps), repeats)))
    base = rates.pop("")
    tried = [Trial(name, rate, rate.median / base.median, variants[name][1]) for name, rate in rates.items()]
    tried.sort(key=lambda trial: -trial.ratio)
    shared = together.median < _SHARED * min(base.median, model.median)
    bottleneck = "input" if base.median < model.median else "model"
    advice = _advice(bottleneck, base, model, together, shared, tried)
    spread = strategies.describe(job.strategy)
    devices = {"strategy": spread["kind"], "devices": list(spread["devices"]), "machine": platform.machine()}
    made_with = devices | about(job.data.info)
    return InputReport(what, base, model, together, bottleneck, shared, tuple(tried), advice, made_with)


_FILES = ("folder", "records", "tfds")
_LESS = "shows the cost of augmentation"


def reading_of(what: Recipe, kept: str) -> Reading:
    """How a recipe reads its files, with decoded examples kept as `cache=kept` says."""
    directory = what.cache_directory if kept in ("auto", "disk") else None
    return Reading(what.image_size, what.skip_corrupt, kept, directory, what.memory_bytes, length=what.length)


def _variants(
    what: Recipe, examples: Examples, sample: Examples | None, data: Data, cluster: Cluster
) -> dict[str, tuple[Data, str]]:
    """Opens the data with each setting that may help; returns data and note by setting."""
    found = {}

    def add(name, note="", source=examples, **changes):
        changed = what.model_copy(update={"cache": "auto", "cache_directory": None, **changes})
        found[name] = building.open_data(changed, cluster, source=source), note

    cores = os.cpu_count() or 1
    if sample is not None:
        kept = f"on a sample of {len(sample.labels):,}" if len(sample.labels) < len(examples.labels) else ""
        add("cache='memory'", kept, source=sample, validation=0.0, test=0.0)
    elif parse_source(what.data).kind in _FILES:
        add("cache='none'", source=open_source(what.data, reading_of(what, "none")))
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
    """Decodes a random sample of limited size, as the memory cache would hold it."""
    x = examples.load(tf.constant(0, tf.int64))
    count = min(len(examples.labels), max(1, _SAMPLE_BYTES // (x.dtype.size * math.prod(x.shape))))
    chosen = np.sort(np.random.default_rng(0).permutation(len(examples.labels))[:count])
    decoded = tf.data.Dataset.from_tensor_slices(chosen).map(examples.load, num_parallel_calls=tf.data.AUTOTUNE)
    array = np.stack(list(decoded.as_numpy_iterator()))
    own = {"train": np.arange(count)}
    return replace(
        examples, labels=examples.labels[chosen], array=array, load=None, where=None, copies=np.arange(count), own=own
    )


class _Clock(keras.callbacks.Callback):
    """Records the duration of each epoch."""

    every_batch = has_memory = False

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._begun)


def epoch_times(job: building.Job, dataset: tf.data.Dataset, epochs: int, **options: Any) -> list[float]:
    """Trains one warm-up epoch and then `epochs`; returns the seconds of each.

    An epoch ends when its losses are known, so that all its steps are done.

    Args:
        options: further arguments of `fit`.
    """
    clock = _Clock()
    job.model.fit(dataset, epochs=epochs + 1, callbacks=[clock], shuffle=False, verbose=0, **options)
    return clock.seconds[1:]


def _model_rate(job: building.Job, seconds: float, repeats: int) -> tuple[Rate, int]:
    """Trains on one batch repeatedly; returns the rate, and the steps of an epoch that takes `seconds`."""
    batch = job.data.peek()
    ready = tf.data.Dataset.from_tensors(batch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    step = epoch_times(job, ready.repeat(_FIRST_STEPS).with_options(options), 1)[0] / _FIRST_STEPS
    steps = max(_FIRST_STEPS, round(seconds / step))
    count = steps * len(batch[1])
    return Rate(tuple(count / s for s in epoch_times(job, ready.repeat(steps).with_options(options), repeats))), steps


def _advice(bottleneck: str, base: Rate, model: Rate, together: Rate, shared: bool, tried: list[Trial]) -> str:
    if bottleneck == "model":
        text = f"The model is the bottleneck: the input is {base.median / model.median:.1f} times as fast."
        if not shared:
            return f"{text} No setting of the input would make training faster."
        text += " Together they are slower than either: they compete for the CPU, so a cheaper input helps too."
    else:
        text = f"The input is the bottleneck: the model waits {1 - base.median / model.median:.0%} of the time."
    for trial in tried:
        # At least 10 % faster, and its slowest measurement beats the fastest without it.
        is_better = trial.ratio >= _WORTH and min(trial.rate.values) > max(base.values)
        if is_better and trial.note != _LESS:
            return f"{text} {trial.setting} makes the input {trial.ratio:.1f} times as fast."
    return (
        f"{text} No measured setting makes the input at least 10 % faster: store the examples smaller or decoded, or "
        "use more CPU cores."
    )


def about(info: Info) -> dict[str, object]:
    """The facts of a measurement: cores, versions and sizes."""
    return {
        "cores": os.cpu_count(),
        "global_batch": info.global_batch,
        "train_examples": info.train_examples,
        "input_shape": list(info.input_shape),
        "cache": info.cache,
        "augment": [name for name, _ in info.augment],
        "versions": facts.versions(),
    }
