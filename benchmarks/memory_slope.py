"""How much host memory training keeps with each step, by slope: `python -m benchmarks.memory_slope`.

TensorFlow keeps a record of each collective for each call of a function, and never frees it. Two replicas on CPU
devices meet in TensorFlow's collectives, as GPUs do. Each measurement trains in a process of its own until blocks have
their length, then reads the process's memory after each of several chunks of steps. The slope is a least-squares fit
over the chunks; printed is the median of the repeats with least and most.
"""

import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.children import ROOT

STEPS = 100_000
BLOCKS = {"cnn": 0, "resnet18": 8}
"""Residual blocks of each model: ResNet-18's layers, with 20 of BatchNormalization, or a stem alone, with 2.

They have few channels, so that a step is short: the records do not depend on it.
"""
CHANNELS, SIDE, BATCH, BATCHES = 4, 8, 4, 8


def build(blocks: int) -> Any:
    """A residual network without its width; each second block but the first has a shortcut with a convolution."""
    from keras import Input, Model, layers

    def convolve(x, kernel):
        return layers.BatchNormalization()(layers.Conv2D(CHANNELS, kernel, padding="same", use_bias=False)(x))

    inputs = Input((SIDE, SIDE, 3))
    x = layers.ReLU()(convolve(inputs, 3))
    if not blocks:
        x = layers.ReLU()(convolve(x, 3))
    for number in range(blocks):
        y = convolve(layers.ReLU()(convolve(x, 3)), 3)
        x = convolve(x, 1) if number and number % 2 == 0 else x
        x = layers.ReLU()(layers.Add()([x, y]))
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def train(model: str, block: int) -> Callable[[int], int]:
    """Makes a model on two replicas; returns what trains it for so many steps and gives the steps of a call.

    Args:
        model: of `BLOCKS`.
        block: steps a call; 0 leaves it to `fit`.
    """
    import keras
    import tensorflow as tf

    import tfgpu
    from tfgpu.core import step_blocks

    strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"])
    with strategy.scope():
        made = build(BLOCKS[model])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES * BATCH, SIDE, SIDE, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, random.integers(0, 10, len(x))))
    data = data.batch(BATCH, drop_remainder=True).cache().repeat()

    def fit(steps: int) -> int:
        with step_blocks.fixed_steps_per_call(block or None):
            made.fit(data, steps_per_epoch=steps, verbose=0)
        return block or made.train_function.pace.steps

    return fit


@contextlib.contextmanager
def collectives_between_cpus():
    """CPU devices of one process meet in collectives within the block, as GPUs do."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu_emulation"))
    import gpu_way

    import tfgpu

    tfgpu.environment.set_logical_devices(3)
    with gpu_way.gpu_way(2):
        yield


def held() -> int:
    """Bytes of this process's own memory, after freed memory went back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def measure(model: str, block: int, steps: int, chunks: int) -> dict:
    """Trains in this process; returns steps a call, and bytes a step by the slope over chunks of so many steps."""
    with collectives_between_cpus():
        fit = train(model, block)
        for _ in range(3):  # blocks reach their length, and TensorFlow's pools their size
            fit(steps)
        done, found = [0], [held()]
        for _ in range(chunks):
            in_a_call = fit(steps)
            done.append(done[-1] + steps)
            found.append(held())
    return {"steps a call": in_a_call, "bytes a step": float(np.polyfit(done, found, 1)[0]), "held": found}


def measured(model: str, block: int, steps: int, chunks: int, timeout_s: float = 1800) -> dict:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory_slope", "--only", "--models", model]
    command += ["--blocks", str(block), "--steps", str(steps), "--chunks", str(chunks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(BLOCKS)}, by comma.")] = ",".join(BLOCKS),
    blocks: Annotated[str, typer.Option(help="Steps a call, by comma; 0 leaves it to `fit`.")] = "0,1",
    steps: Annotated[int, typer.Option(min=1, help="Of a chunk; a tenth of it where calls have one step.")] = 800,
    chunks: Annotated[int, typer.Option(min=2)] = 5,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Prints a line for each model and length of blocks."""
    if only:
        print(json.dumps(measure(models, int(blocks), steps, chunks)))
        return
    for model in models.split(","):
        for block in map(int, blocks.split(",")):
            count = max(1, steps // 10) if block == 1 else steps
            found = [measured(model, block, count, chunks) for _ in range(repeats)]
            slopes = sorted(each["bytes a step"] for each in found)
            low, middle, high = (STEPS * slope / 2**20 for slope in (slopes[0], statistics.median(slopes), slopes[-1]))
            calls = sorted({each["steps a call"] for each in found})
            print(
                f"{model:9} {'fit' if not block else block:>3}: {', '.join(map(str, calls))} steps a call, "
                f"{statistics.median(slopes):,.0f} bytes a step, {middle:,.0f} MiB in {STEPS:,} steps "
                f"({low:,.0f} to {high:,.0f}, {repeats} processes)",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
