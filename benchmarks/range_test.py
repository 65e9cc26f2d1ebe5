"""Does the range test's suggestion train well? Beside a grid of rates, on the digits.

python -m benchmarks.range_test --seeds 3
"""

import logging
import math
import os
from typing import Annotated

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import typer

import tfgpu

OPTIMIZERS = {
    "SGD with momentum": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "Adam": keras.optimizers.Adam,
}
MODELS = ("mlp", "cnn")
GRID = [10 ** (k / 2 - 5) for k in range(11)]  # 1e-5 to 1
EPOCHS = 5


def build(model: str, optimizer: str, rate: float, seed: int, info) -> keras.Model:
    """A model of the digits, with first weights of the seed."""
    keras.utils.set_random_seed(seed)
    made = tfgpu.models.build(model, input_shape=info.input_shape, classes=info.classes)
    made.compile(OPTIMIZERS[optimizer](rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def final(model: keras.Model, data) -> float:
    """The validation loss after some epochs."""
    data.seek(0)
    model.fit(data.train, epochs=EPOCHS, shuffle=False, verbose=0)
    loss = model.evaluate(data.validation, verbose=0)
    return float(loss) if math.isfinite(loss) else math.inf


def spread(losses) -> str:
    """Their mean, and the least and the largest."""
    return f"{np.mean(losses):.3f} ({np.min(losses):.3f} to {np.max(losses):.3f})"


def main(seeds: Annotated[int, typer.Option(min=1)] = 3) -> None:
    """Prints a row for each model and optimizer."""
    logging.getLogger("tensorflow").setLevel("ERROR")
    data = tfgpu.data.load("digits", global_batch=32, validation=0.1, test=0.2)
    print("| model, optimizer | suggestion by seed | loss there | best of 11 rates | its rate | rank |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            found, there, grid = [], [], np.zeros((seeds, len(GRID)))
            for seed in range(seeds):
                data.seek(0)
                tested = tfgpu.tune.learning_rate(build(model, optimizer, 1e-3, seed, data.info), data)
                assert tested.suggestion is not None, tested.reason
                found.append(tested.suggestion)
                there.append(final(build(model, optimizer, tested.suggestion, seed, data.info), data))
                grid[seed] = [final(build(model, optimizer, rate, seed, data.info), data) for rate in GRID]
            means = grid.mean(0)
            rank = 1 + int((means < np.mean(there)).sum())
            best = int(np.argmin(means))
            rates = ", ".join(f"{rate:.1e}" for rate in found)
            losses = f"{spread(there)} | {spread(grid[:, best])}"
            print(f"| {model}, {optimizer} | {rates} | {losses} | {GRID[best]:.1e} | {rank} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
