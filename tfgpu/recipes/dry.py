"""A dry run: builds everything in a recipe, then trains and validates on synthetic examples.

It needs no data if the recipe determines the shape of the examples: `digits`, `tfds:NAME` (from its builder),
a corpus, or `image_size` and `classes`. Other sources are opened. Nothing is written.
"""

import contextlib
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import keras
import numpy as np

from tfgpu import environment
from tfgpu.callbacks.memory import Memory, peaks
from tfgpu.callbacks.progress import line
from tfgpu.data.examples import Examples
from tfgpu.data.names import parse_source
from tfgpu.data.prepared import shape_of as shape_of_tfds
from tfgpu.data.text.corpus import LENGTH, VOCABULARY
from tfgpu.errors import InputError
from tfgpu.recipes import building, facts, heads, runner
from tfgpu.recipes.recipe import Recipe

UPDATES = 2
ROWS_ON_CPUS = 4  # examples per replica without a GPU


@dataclass(frozen=True)
class Shape:
    """The shape of a dataset's examples.

    Attributes:
        shape: of one example.
        classes: how many.
        kind: "image", "digits" or "corpus".
    """

    shape: tuple[int, ...]
    classes: int
    kind: str = "image"


def run(what: Recipe) -> list[str]:
    """Builds everything, trains two updates, validates, and reports.

    Args:
        what: the recipe. On CPUs, batches are reduced to four examples per replica, with a note.

    Returns:
        Lines to print: the data, shapes, parameters, memory, losses.

    Raises:
        InputError: something in the recipe is invalid, or the process is part of a cluster.
    """
    if what.preset:
        raise InputError(
            "A dry run makes up its data, but a pretrained model needs text. Remove --dry-run, or try --epochs 1 on "
            "a few lines."
        )
    known = shape_of(what)
    cluster = runner.check(what, is_dry=known is not None)
    if cluster.is_multi_worker:
        raise InputError("A dry run needs a single process. Received: a cluster. Unset TF_CONFIG.")
    with contextlib.ExitStack() as held:
        held.enter_context(building.prepare(what))
        small = _small(what) if known else what
        source = None if known is None else made_up(known, small.global_batch, small.accumulate)
        begun = time.perf_counter()
        job = building.build(small, cluster, source=source)
        built_s = time.perf_counter() - begun
        logs = _train(job)
        return _lines(what, job, logs, is_real=known is None, built_s=built_s)


def shape_of(what: Recipe) -> Shape | None:
    """Returns the shape of a recipe's examples, if it is known without the data.

    Args:
        what: the recipe.

    Returns:
        None if only the data can tell.

    Example:
        >>> shape_of(Recipe(data="photos/", image_size=64, classes=5))
        Shape(shape=(64, 64, 3), classes=5, kind='image')
    """
    kind, _, rest = what.data.partition(":")
    if what.data == "digits":
        return Shape((8, 8, 1), 10, "digits")
    if kind == "corpus":
        return Shape((what.length or LENGTH,), VOCABULARY, "corpus")
    if kind == "tfds":
        parse_source(what.data)
        found = shape_of_tfds(rest, what.image_size)
        if found is not None:
            return Shape(*found)
    return Shape((*what.image_size, 3), what.classes) if what.image_size and what.classes else None


def made_up(known: Shape, batch: int, accumulate: int) -> Examples:
    """Makes synthetic examples: enough for two updates, and for one batch each of validation and test.

    Example:
        >>> made_up(Shape((8, 8, 3), 5), batch=4, accumulate=1).array.shape
        (16, 8, 8, 3)
    """
    counts = {"train": UPDATES * batch * accumulate, "validation": batch, "test": batch}
    total, draw = sum(counts.values()), np.random.default_rng(0)
    labels = np.arange(total) % known.classes
    if known.kind == "digits":
        array = draw.random((total, *known.shape), np.float32)
    elif known.kind == "image":
        array = draw.integers(0, 256, (total, *known.shape), np.uint8)
    else:
        array = draw.integers(1, VOCABULARY, (total, *known.shape), np.int32)
        labels = np.roll(array, -1, axis=1)
    ends = np.cumsum([0, *counts.values()])
    own = {part: np.arange(ends[i], ends[i + 1]) for i, part in enumerate(counts)}
    return Examples("synthetic", labels, known.shape, tuple(map(str, range(known.classes))), array=array, own=own)


def _small(what: Recipe) -> Recipe:
    """Returns the recipe for a dry run: small batches on CPUs, no cache, and averaging from the only epoch."""
    changes: dict[str, Any] = {"cache": "auto", "cache_directory": None, "image_size": None, "length": None}
    if not environment.devices("GPU"):
        chosen = what.devices if isinstance(what.devices, int) else len(what.devices or ())
        changes["global_batch"] = min(what.global_batch, ROWS_ON_CPUS * max(1, what.virtual_devices, chosen))
    return what.model_copy(update=changes)


def _train(job: building.Job) -> dict[str, float]:
    history = job.model.fit(
        job.data.train.take(UPDATES * job.recipe.accumulate),
        validation_data=None if job.data.validation is None else job.data.validation.take(1),
        epochs=1,
        callbacks=[*job.callbacks, Memory()],
        shuffle=False,
        verbose=0,
    )
    return {name: values[-1] for name, values in history.history.items()}


def _lines(what: Recipe, job: building.Job, logs: dict[str, float], *, is_real: bool, built_s: float) -> list[str]:
    info, model = job.data.info, job.model
    about = facts.collect(job, datetime.now())
    batch, steps = job.recipe.global_batch, min(UPDATES * what.accumulate, info.steps_per_epoch)
    cut = f" (cut from {what.global_batch:,} for CPUs)" if batch < what.global_batch else ""
    size = {name: value for name, value in logs.items() if name in ("loss", "val_loss")}
    learns = f"{info.classes:,} classes" if info.targets is None else facts.learned_text(info.targets)
    outputs = heads.output_shapes(model) or model.output_shape[1:]
    where = "the recipe's data" if is_real else "synthetic data"
    return [
        f"dry run of {what.model} on {what.data}, with {where}; nothing is written",
        f"examples of {facts.shape_text(info.input_shape)}, {learns}; outputs {facts.shape_text(outputs)}",
        f"{facts.where(about)}, {about['precision']}, {about['parameters']:,} parameters",
        f"{_size(model.weights)} of weights, {_size(model.optimizer.variables)} of {what.optimizer}'s state; built in "
        f"{built_s:.1f} s",
        f"{steps} steps of {batch:,} examples{cut} and a validation: {line(size)}",
        f"peak memory {line(peaks())}",
    ]


def _size(variables: list[keras.Variable]) -> str:
    count = sum(int(np.prod(v.shape)) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables)
    return f"{count / 2**20:,.1f} MiB"
