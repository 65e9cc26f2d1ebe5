"""Tries one batch size in a separate process: builds the recipe's model, and trains it for some steps.

Runs as `python -m tfgpu.tune.batch_try FD`, see `tfgpu.tune.trial`. One batch is prepared (synthetic if the recipe
determines the shape of examples, otherwise of its data) and repeated, so that the input takes no time.
"""

import math
import resource
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfgpu import environment
from tfgpu.callbacks.memory import peaks
from tfgpu.errors import InputError, MachineError
from tfgpu.measure.input import epoch_times
from tfgpu.recipes import building, compiling, dry, runner
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune.trial import Line, serve

_ROUND_S = 0.5
_GUESSES = 3
_MOST_UPDATES = 10_000


def run(task: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Handles a task of the search: collects facts about the recipe ("about"), or tries a batch."""
    what = recipes.make(task["recipe"])
    if task["about"]:
        return {"end": "complete", **about(what)}
    if task["memory_limit_bytes"] is not None:
        limit(task["memory_limit_bytes"])
    measured = measure(what, task["repeats"])
    more = recipes.make({**task["recipe"], **task["settings"]})
    return {"end": "complete", **measured, "refused": _refused(more, task["examples"])}


def about(what: Recipe) -> dict[str, Any]:
    """Returns the numbers of replicas and of training examples (None if unknown without the data)."""
    known = dry.shape_of(what)
    cluster = runner.check(what, is_dry=known is not None)
    with building.prepare(what):
        replicas = building.strategy_of(what, cluster).num_replicas_in_sync
        examples, missing = None, ""
        # Opens the data without decoding it into memory.
        kept = {"cache": "auto", "cache_directory": None, "memory_bytes": 0, "global_batch": 1}
        try:
            examples = building.open_data(what.model_copy(update=kept), cluster).info.train_examples
        except (InputError, MachineError) as error:
            if known is None:
                raise
            missing = str(error)
    devices = environment.accelerators()
    return {
        "replicas": replicas,
        "examples": examples,
        "missing": missing,
        "made_up": known is not None,
        "device": devices[0].description or devices[0].kind,
    }


def limit(memory_bytes: int) -> None:
    """Limits TensorFlow's memory on each GPU; without GPUs, the data segment of this process.

    On Linux, RLIMIT_DATA counts reserved memory, which is more than the resident memory.
    """
    if tf.config.list_physical_devices("GPU"):
        environment.set_memory_limit(memory_bytes)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def measure(what: Recipe, repeats: int) -> dict[str, Any]:
    """Trains a recipe's model repeatedly on one batch.

    Args:
        what: the recipe, with the batch to try.
        repeats: the number of measurements, of half a second or one update each.

    Returns:
        The median and range of examples per second, and the memory peaks.
    """
    known = dry.shape_of(what)
    cluster = runner.check(what, is_dry=known is not None)
    with building.prepare(what):
        made, source = what, None
        if known is not None:
            changes = {"cache": "auto", "cache_directory": None, "image_size": None, "length": None}
            made = what.model_copy(update=changes)
            source = dry.made_up(known, what.global_batch, what.accumulate)
        job = building.build(made, cluster, source=source)
        batch = job.data.train.take(1).cache().repeat()
        steps, held = what.accumulate, job.data.validation
        # The first epoch traces, and validates as a run does between epochs; the second gives the time of a step.
        validated = {} if held is None else {"validation_data": held.take(1), "validation_freq": [1]}
        (seconds,) = epoch_times(job, batch, 1, steps_per_epoch=steps, **validated)
        for _ in range(_GUESSES):  # Starting an epoch takes as long as many short steps.
            if seconds >= _ROUND_S / 2:
                break
            updates = math.ceil(steps / what.accumulate * _ROUND_S / seconds)
            steps = min(updates, _MOST_UPDATES) * what.accumulate
            seconds = epoch_times(job, batch, 1, steps_per_epoch=steps)[0]
        times = epoch_times(job, batch, repeats, steps_per_epoch=steps)
        rates = [steps * what.global_batch / seconds for seconds in times]
        return {"examples_per_s": statistics.median(rates), "spread": [min(rates), max(rates)], "peaks": peaks()}


def _refused(what: Recipe, examples: int | None) -> str:
    """Why a run would reject these settings, although the schema accepts them."""
    if examples is None:
        return ""
    try:
        compiling.schedule(what, steps_per_epoch=math.ceil(examples / what.global_batch))
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    serve(int(sys.argv[1]), run)
