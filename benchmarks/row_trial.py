"""What the trial of a custom training step costs: `python -m benchmarks.row_trial`.

Before the first step on replicas, a `train_step` that is not Keras's runs on a few random rows. Each measurement is a
process of its own: the seconds of the trial, and those from `fit` to the end of the first step, trial included. Printed
are medians with least and most, the trial's part of the time that there would be without it, and what it takes in later
runs, which find its verdict kept.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import typer

from benchmarks.children import ROOT

MODELS = ("mlp", "cnn", "resnet", "transformer", "bert")  # the last one needs KerasHub


def build(name: str):
    """A functional model, and the shapes of its inputs without rows."""
    from keras import Model, layers, ops

    if name == "bert":
        models = importlib.import_module("keras_hub").models
        backbone = models.BertBackbone(30522, num_layers=4, num_heads=8, hidden_dim=512, intermediate_dim=2048)
        inputs = {each: backbone.input[each] for each in ("padding_mask", "segment_ids", "token_ids")}
        output = layers.Dense(10)(backbone.output["pooled_output"])
        return Model(inputs, output), dict.fromkeys(inputs, (128,))

    if name == "mlp":
        inputs = layers.Input((64,))
        x = layers.Dense(128, activation="relu")(layers.Dense(128, activation="relu")(inputs))
        return Model(inputs, layers.Dense(10)(x)), (64,)
    if name == "transformer":
        inputs = layers.Input((32, 64))
        x = inputs
        for _ in range(4):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, activation="gelu")(x)))
        return Model(inputs, layers.Dense(10)(ops.mean(x, 1))), (32, 64)
    inputs = layers.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(8 if name == "resnet" else 2):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x)))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(y))])
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), (32, 32, 3)


def measure_here(name: str) -> dict[str, float]:
    """One first step on two replicas of a model whose `train_step` is written by hand, by rows."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu
    from tfgpu.core.row_mixing.trials import step_trial

    tfgpu.environment.set_logical_devices(2)

    class Written(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        inner, shape = build(name)
        model = Written(inner.input, inner.output)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spent, stock = [], step_trial.needs_whole_batch

    def timed(*args, **more):
        began = time.perf_counter()
        needs = stock(*args, **more)
        spent.append(time.perf_counter() - began)
        assert not needs
        return needs

    step_trial.needs_whole_batch = timed
    one = {name: np.ones((16, *each), "int32") for name, each in shape.items()} if isinstance(shape, dict) else None
    x, y = np.zeros((16, *shape), "float32") if one is None else one, np.zeros(16, "int64")
    began = time.perf_counter()
    model.fit(x, y, batch_size=16, verbose=0)
    return {"trial_s": sum(spent), "first_step_s": time.perf_counter() - began}


def measure(name: str, repeats: int, cache: str) -> list[dict[str, float]]:
    """The same in processes of their own, which keep what trials find in a folder, or with "off" nowhere."""
    command = [sys.executable, "-m", "benchmarks.row_trial", "--here", name]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "TFGPU_CACHE": cache}
    found = []
    for _ in range(repeats):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main(
    repeats: Annotated[int, typer.Option(help="Processes for each model.")] = 5,
    here: Annotated[str, typer.Option(help="Measure one model in this process; prints JSON.")] = "",
) -> None:
    """Prints a table."""
    if here:
        print(json.dumps(measure_here(here)))
        return
    print("| model | first step, s | trial, s | trial / rest | a later run: trial, s |\n|---|---|---|---|---|")
    for name in MODELS[: None if importlib.util.find_spec("keras_hub") else -1]:
        rows = measure(name, repeats, "off")
        cells = [_spread([row[key] for row in rows]) for key in ("first_step_s", "trial_s")]
        ratio = _spread([row["trial_s"] / (row["first_step_s"] - row["trial_s"]) for row in rows])
        with tempfile.TemporaryDirectory() as kept:
            _, *later = measure(name, repeats + 1, kept)
        cells += [ratio, _spread([row["trial_s"] for row in later])]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    typer.run(main)
