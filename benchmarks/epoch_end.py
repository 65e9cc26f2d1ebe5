"""What the end of an epoch costs: `fit` where a thread waits for the end of the data, and where `fit` itself does.

tf.data's tuning thread often misses the call to end while it sleeps (`tfgpu/core/iterator_end.py`). A `fit` of short
epochs and one of longer ones run in turn with that repair and without; each time is the whole `fit`'s.

python -m benchmarks.epoch_end --repeats 15
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks import machine

FITS = {"short": (0.1, 20), "longer": (2.0, 3)}
"""Seconds an epoch, about, and epochs."""
_BATCH = 32


def prepare(kind: str, seconds: float, epochs: int) -> Callable[[bool], float]:
    """Builds a model and data that take about so long; returns what times a `fit`.

    Args:
        kind: the strategy; `"distributed"` is `"mirrored"` with data that the script distributes itself.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu
    from tfgpu.core import iterator_end

    strategy = tfgpu.strategy("one_device") if kind == "one_device" else tfgpu.strategy("mirrored", devices=2)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tfgpu.models.mlp(input_shape=(64,), classes=10)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)

    def data(steps: int) -> Any:
        x, y = random.random((steps * _BATCH, 64)).astype("float32"), random.integers(0, 10, steps * _BATCH)
        found = tf.data.Dataset.from_tensor_slices((x, y))
        found = found.map(lambda a, b: (a * 2 - 1, b), num_parallel_calls=tf.data.AUTOTUNE)
        found = found.batch(_BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        return strategy.experimental_distribute_dataset(found) if kind == "distributed" else found

    def fit(source: Any, count: int) -> float:
        begun = time.perf_counter()
        model.fit(source, epochs=count, verbose=0)
        return time.perf_counter() - begun

    fit(data(200), 2)
    steps = max(20, round(200 * seconds / fit(data(200), 1)))
    source = data(steps)
    fit(source, 1)

    def run(repaired: bool) -> float:
        if repaired:
            return fit(source, epochs)
        with mock.patch.object(iterator_end, "resources", lambda iterator: []):
            return fit(source, epochs)

    return run


def main(
    repeats: Annotated[int, typer.Option(min=3, help="Fits with the repair, and as many without.")] = 15,
    kind: Annotated[list[str] | None, typer.Option(help="one_device, mirrored, distributed [all].")] = None,
) -> None:
    """Prints JSON: seconds of a `fit`, and the ratio of each pair."""
    import tfgpu

    tfgpu.environment.set_logical_devices(2)
    found = {}
    for name in kind or ("one_device", "mirrored", "distributed"):
        for length, (seconds, epochs) in FITS.items():
            run = prepare(name, seconds, epochs)
            pairs = []
            for number in range(repeats):
                order = (True, False) if number % 2 else (False, True)
                pairs.append({repaired: run(repaired) for repaired in order})
            found[f"{name}, {length}"] = {
                "epochs": epochs,
                "fit_s without": _spread([pair[False] for pair in pairs]),
                "fit_s with": _spread([pair[True] for pair in pairs]),
                "with / without": _spread([pair[True] / pair[False] for pair in pairs]),
            }
    print(json.dumps({**machine.facts(), "repeats": repeats, "fits": found}, indent=2))


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


if __name__ == "__main__":
    typer.run(main)
