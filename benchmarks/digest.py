"""What comparing the replicas costs, and whether it ever errs: `python -m benchmarks.digest`.

On two logical CPU devices: the seconds of equal trainings with `check_replicas` "off", "auto", 10 and 1, in turns, as
ratios to "off" in the same turn (median, least and most); and a training of many steps with a comparison every 10, in
which nothing differs, so that an alarm, which ends the command with an error, is false.
"""

import statistics
import time
from typing import Annotated

import typer

SETTINGS = {"off": 0, "auto": None, "10": 10, "1": 1}


def build(width: int):
    """A model of some layers on two replicas, and its rows."""
    import keras
    import numpy as np

    import tfgpu

    keras.utils.set_random_seed(0)
    with tfgpu.strategy("mirrored", devices=2).scope():
        hidden = [keras.layers.Dense(width, "relu") for _ in range(3)]
        norms = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
        model = keras.Sequential([keras.Input((64,)), *hidden, *norms, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    random = np.random.default_rng(0)
    return model, random.normal(size=(6400, 64)).astype("float32"), random.integers(0, 10, 6400)


def fit(model, x, y, every: int | None, epochs: int) -> tuple[float, int]:
    """The seconds of a training of 100 steps an epoch, and the comparisons made in it."""
    import keras

    from tfgpu.consistency import settings, watch

    seen = []
    settings.choose(model.distribute_strategy, settings.Checks(every))
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(watch.watch_of(model)))
    began = time.perf_counter()
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[note])
    return time.perf_counter() - began, seen[0].comparisons if seen[0] is not None else 0


def main(
    width: Annotated[int, typer.Option(help="Units of a hidden layer.")] = 256,
    turns: Annotated[int, typer.Option(help="Trainings with each setting.")] = 5,
    epochs: Annotated[int, typer.Option(help="Epochs of 100 steps in each.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps of the training without differences.")] = 10_000,
) -> None:
    import tfgpu

    tfgpu.environment.set_logical_devices(2)
    model, x, y = build(width)
    for every in SETTINGS.values():
        fit(model, x, y, every, 1)
    ratios, counts = {name: [] for name in SETTINGS}, {}
    for _ in range(turns):
        took = {}
        for name, every in SETTINGS.items():
            took[name], counts[name] = fit(model, x, y, every, epochs)
        for name, seconds in took.items():
            ratios[name].append(seconds / took["off"])
    print(f"{model.count_params():,} weights, {epochs * 100} steps a training")
    for name, found in ratios.items():
        spread = f"{statistics.median(found):.3f} [{min(found):.3f}, {max(found):.3f}]"
        print(f'check_replicas="{name}": {spread} of the time of "off", {counts[name]} comparisons')
    _, comparisons = fit(model, x, y, 10, steps // 100)
    print(f"{steps:,} steps, {comparisons:,} comparisons, 0 alarms")


if __name__ == "__main__":
    typer.run(main)
