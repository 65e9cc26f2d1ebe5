"""What `Monitor` costs: the time of a step with it and without, in turn, in one process.

Samples are taken each second and go to all places: both tables, TensorBoard's events and Prometheus's file. The time is
an epoch's, from its begin to its end. Beside it stands the processor's time that the monitor's thread takes, as a share
of one core: that is the most that it can cost a step.

python -m benchmarks.monitor --repeats 40
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks import machine

WORKS = {"small": ("mlp", (64,), 10, {}, 32), "middle": ("cnn", (32, 32, 3), 10, {}, 32)}
"""Builder, input shape, classes, options, global batch."""


def prepare(work: str, seconds: float) -> Callable[[bool], dict[str, float]]:
    """Builds a model; returns what trains it for an epoch of about so many seconds and times that."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu

    builder, shape, classes, options, batch = WORKS[work]
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("one_device").scope():
        model = tfgpu.models.build(builder, input_shape=shape, classes=classes, options=options)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x, y = random.random((batch, *shape)).astype("float32"), random.integers(0, classes, batch)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()

    class Clock(keras.callbacks.Callback):
        every_batch = False

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.seconds = time.perf_counter() - self.begun

    def epoch(steps: int, callbacks: list) -> float:
        clock = Clock()
        model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[*callbacks, clock])
        return clock.seconds

    epoch(20, [])
    steps = max(5, round(20 * seconds / epoch(20, [])))
    steps = max(5, round(steps * seconds / epoch(steps, [])))  # Blocks have grown by now.

    def run(watched: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            monitor = tfgpu.callbacks.Monitor(folder, tensorboard=folder, prometheus=True)
            passed = epoch(steps, [monitor] if watched else [])
        return {"step_s": passed / steps, "thread": monitor.cost_s / passed, "steps": steps}

    return run


def main(
    repeats: Annotated[int, typer.Option(min=3, help="Epochs with the monitor, and as many without.")] = 40,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long an epoch takes, about.")] = 2.0,
    work: Annotated[list[str] | None, typer.Option(help="small, middle [both].")] = None,
) -> None:
    """Prints JSON: step times, the ratio of each pair's, and the thread's share of a core."""
    found = {}
    for name in work or list(WORKS):
        run = prepare(name, seconds)
        pairs = []
        for number in range(repeats):
            order = (True, False) if number % 2 else (False, True)
            pairs.append({watched: run(watched) for watched in order})
        found[name] = {
            "model": WORKS[name][0],
            "steps an epoch": pairs[0][True]["steps"],
            "step_ms without": _spread([pair[False]["step_s"] * 1e3 for pair in pairs]),
            "step_ms with": _spread([pair[True]["step_s"] * 1e3 for pair in pairs]),
            "with / without": _spread([pair[True]["step_s"] / pair[False]["step_s"] for pair in pairs]),
            "thread's share of a core": _spread([pair[True]["thread"] for pair in pairs]),
        }
    print(json.dumps({**machine.facts(), "repeats": repeats, "works": found}, indent=2))


def _spread(values: list[float]) -> dict[str, list[float]]:
    """The median, the quartiles, and where the median of many such repeats would lie in 95 of 100 cases."""
    ordered, count = sorted(values), len(values)
    low, median, high = statistics.quantiles(ordered, n=4)
    aside = max(0, round(count / 2 - 0.98 * count**0.5) - 1)  # the binomial's, by its normal form
    found = {"median": [median], "quartiles": [low, high], "median, 95%": [ordered[aside], ordered[-1 - aside]]}
    return {name: [float(f"{value:.4g}") for value in each] for name, each in found.items()}


if __name__ == "__main__":
    typer.run(main)
