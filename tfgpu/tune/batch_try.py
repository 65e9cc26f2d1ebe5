"""One try of a batch size, in a process of its own: the recipe's model is built and trained for some steps.

`python -m tfgpu.tune.batch_try FD`, as `tfgpu.tune.trial`. The input costs nothing: one batch is made (of made-up
examples where the recipe says what they are like, else of its data), kept, and given again and again.
"""

import math
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfgpu.errors import InputError, MachineError
from tfgpu.recipes import building, runner
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune.trial import Line, serve

_ROUND_S = 0.5
_GUESSES = 3
_MOST_UPDATES = 10_000


def run(task: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Does what the search sends: looks at the recipe ("about"), or tries a batch."""
    what = recipes.make(task["recipe"])
    if task["about"]:
        return {"end": "complete", **about(what)}
    if task["memory_limit_bytes"] is not None:
        limit(task["memory_limit_bytes"])
    measured = measure(what, task["rounds"])
    more = recipes.make({**task["recipe"], **task["settings"]})
    return {"end": "complete", **measured, "refused": _refused(more, task["examples"])}


def about(what: Recipe) -> dict[str, Any]:
    """Says how many replicas share a batch, and how many examples there are to train on (None: only the data knows)."""
    from tfgpu import environment
    from tfgpu.recipes import dry

    known = dry.shape_of(what)
    cluster = runner.check(what, None, resume=False, overwrite=False, is_dry=known is not None)
    with building.prepare(what):
        replicas = building.strategy_of(what, cluster).num_replicas_in_sync
        examples, missing = None, ""
        # Opened, and not decoded into memory.
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
    """Lets TensorFlow take so much of each GPU; where there is none, lets this process have so much data.

    On Linux that is what it reserves for data of its own (RLIMIT_DATA), which is more than what is resident.
    """
    import tensorflow as tf

    from tfgpu import environment

    if tf.config.list_physical_devices("GPU"):
        environment.set_memory_limit(memory_bytes)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def measure(what: Recipe, rounds: int) -> dict[str, Any]:
    """Trains a recipe's model on one batch, again and again.

    Args:
        what: the recipe, with the batch to try.
        rounds: how many times some steps are measured, which take half a second together, or are one update.

    Returns:
        Examples a second by round, and the peaks of memory.
    """
    from tfgpu.callbacks.memory import peaks
    from tfgpu.recipes import dry

    known = dry.shape_of(what)
    cluster = runner.check(what, None, resume=False, overwrite=False, is_dry=known is not None)
    with building.prepare(what):
        made, source = what, None
        if known is not None:
            made = what.model_copy(
                update={"cache": "auto", "cache_directory": None, "image_size": None, "length": None}
            )
            source = dry.made_up(known, what.global_batch, what.accumulate)
        job = building.build(made, cluster, source=source)
        batch = job.data.train.take(1).cache().repeat()
        assert job.data.validation is not None  # The runner has checked it.
        steps = what.accumulate
        # Traces, and validates as a run does between epochs; the second epoch says how long a step takes.
        seconds = _train(job, batch, steps, 2, validation=job.data.validation.take(1))[-1]
        for _ in range(_GUESSES):  # The start of an epoch takes as long as many short steps.
            if seconds >= _ROUND_S / 2:
                break
            updates = math.ceil(steps / what.accumulate * _ROUND_S / seconds)
            steps = min(updates, _MOST_UPDATES) * what.accumulate
            seconds = _train(job, batch, steps, 1)[0]
        times = _train(job, batch, steps, rounds + 1)[1:]
        rates = [steps * what.global_batch / seconds for seconds in times]
        return {
            "examples_per_s": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "peaks": peaks(),
        }


def _train(job: Any, batch: Any, steps: int, epochs: int, *, validation: Any = None) -> list[float]:
    """Seconds of each epoch of so many steps; an epoch ends when its losses are known, so all steps are done."""
    import keras

    begun, ended = [], []

    class Clock(keras.callbacks.Callback):
        every_batch = False
        has_memory = False

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            begun.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            ended.append(time.perf_counter())

    job.trainer.fit(
        batch,
        validation_data=validation,
        validation_freq=[1] if validation is not None else 1,
        steps_per_epoch=steps,
        epochs=epochs,
        callbacks=[Clock()],
        shuffle=False,
        verbose=0,
    )
    return [end - begin for begin, end in zip(begun, ended, strict=True)]


def _refused(what: Recipe, examples: int | None) -> str:
    """Why a run with these settings would be refused, which a schema cannot know."""
    from tfgpu.recipes import compiling

    if examples is None:
        return ""
    try:
        compiling.schedule(what, steps_per_epoch=math.ceil(examples / what.global_batch))
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    serve(int(sys.argv[1]), run)
