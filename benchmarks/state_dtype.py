"""Loss curves and bytes of an optimizer whose slots are in float32, block-scaled bfloat16 and 8 bits, over some seeds.

python -m benchmarks.state_dtype [--seeds 5] [--steps 200] [--optimizer AdamW]

A small transformer learns to continue sequences of a random automaton (each token depends on the two before it). Data
and first weights differ by seed, and are the same for all dtypes. Prints a table: the mean of the loss over the last
tenth of the steps (mean of the seeds and their standard deviation), the largest difference of any seed from float32,
and the bytes of the optimizer's variables. `--curves FILE` writes all losses as JSON.
"""

import argparse
import json
import os
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tfgpu
from tfgpu.parallel import memory_by_device
from tfgpu.training.optimizers import with_state_dtype

DTYPES = ("float32", "bfloat16", "int8")
WORDS, LENGTH, BATCH, WIDTH = 32, 32, 16, 64


def sequences(seed: int, count: int) -> np.ndarray:
    """Tokens [count, LENGTH + 1], of which each but a tenth is a function of the two before it."""
    draw = np.random.default_rng(seed)
    table, found = draw.integers(0, WORDS, (WORDS, WORDS)), draw.integers(0, WORDS, (count, LENGTH + 1))
    for at in range(2, LENGTH + 1):
        follows = draw.random(count) < 0.9
        found[:, at] = np.where(follows, table[found[:, at - 2], found[:, at - 1]], found[:, at])
    return found


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(float(logs["loss"]))


def curve(dtype: str, seed: int, steps: int, kind: str) -> tuple[list[float], int]:
    """The mean losses of each tenth of the steps, and the bytes of the optimizer's variables."""
    keras.utils.set_random_seed(seed)
    with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
        model = tfgpu.models.transformer((LENGTH,), WORDS, width=WIDTH, heads=2, depth=2)
        optimizer = getattr(keras.optimizers, kind)(0.003)
        optimizer = optimizer if dtype == "float32" else with_state_dtype(optimizer, dtype)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens, losses = sequences(seed, steps * BATCH), Losses()
    each = max(1, steps // 10)
    for at in range(0, steps, each):
        rows = tokens[at * BATCH : (at + each) * BATCH]
        model.fit(rows[:, :-1], rows[:, 1:], BATCH, shuffle=False, verbose=0, callbacks=[losses])
    return losses.found, memory_by_device(model)["CPU:0"]["optimizer"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", default="AdamW", help="a class of keras.optimizers")
    parser.add_argument("--curves", help="a file for all losses, as JSON")
    asked = parser.parse_args(arguments)
    curves: dict[str, list] = {}
    print("| slots | loss at the start | in the middle | at the end | largest difference of a seed | bytes |")
    print("|---|---|---|---|---|---|")
    for dtype in DTYPES:
        found = [curve(dtype, seed, asked.steps, asked.optimizer) for seed in range(asked.seeds)]
        curves[dtype] = [losses for losses, _ in found]
        losses, reference = np.array(curves[dtype]), np.array(curves["float32"])
        places = 0, losses.shape[1] // 2, -1
        cells = [f"{losses[:, at].mean():.3f} ± {losses[:, at].std():.3f}" for at in places]
        apart = np.abs(losses - reference)[:, -1].max()
        print(f"| {dtype} | {' | '.join(cells)} | {apart:.3f} | {found[0][1]:,} |", flush=True)
    if asked.curves:
        with open(asked.curves, "w") as file:
            json.dump(curves, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
