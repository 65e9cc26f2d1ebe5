"""The README's picture: one script on one device and on two replicas, with stock Keras and with tfgpu.

`python -m benchmarks.same_result docs/start/same-result.svg` trains each in a process of its own, on logical CPU
devices, and draws how far the weights on two replicas are from those on one device, step by step.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.children import ROOT

RUNS = {"one": (False, 1), "stock": (False, 2), "tfgpu": (True, 2)}
"""By name: whether Keras is repaired, and replicas."""
EPOCHS, BATCH = 4, 64


def train(name: str, to: Path) -> None:
    """Trains as a user's script does, and writes all weights after each step."""
    repaired, replicas = RUNS[name]
    import keras
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    if repaired:
        import tfgpu

        tfgpu.repair_keras()
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    strategy = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)])
    keras.utils.set_random_seed(0)
    with strategy.scope() if replicas > 1 else tf.device("CPU:0"):
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                *(layers.Conv2D(16, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()),
                *(layers.Conv2D(32, 3, strides=2, use_bias=False), layers.BatchNormalization(), layers.ReLU()),
                *(layers.GlobalAveragePooling2D(), layers.Dropout(0.2), layers.Dense(10, activation="softmax")),
            ]
        )
        model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    seen = []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.concatenate([weight.ravel() for weight in self.model.get_weights()]))

    model.fit(x[:1700], y[:1700], BATCH, EPOCHS, shuffle=False, verbose=0, callbacks=[Keep()])
    np.save(to, np.stack(seen))


def draw(apart: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from benchmarks.plots import OTHERS_COLOR, OURS_COLOR

    settings = {"svg.hashsalt": "same result", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif"}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.2, 2.9), layout="constrained")
        for name, color, words in (("stock", OTHERS_COLOR, "stock Keras"), ("tfgpu", OURS_COLOR, "tfgpu")):
            axes.plot(range(1, 1 + len(apart[name])), apart[name].clip(1e-7), color=color, linewidth=2)
            axes.annotate(words, (len(apart[name]), apart[name][-1]), (6, 0), textcoords="offset points", color=color)
        axes.set_yscale("log")
        axes.set_ylim(1e-7, 2)
        axes.set_yticks([1e-6, 1e-4, 1e-2, 1], ["0.000001", "0.0001", "0.01", "1"])
        axes.minorticks_off()
        axes.set_xlim(0, len(apart["stock"]) * 1.16)
        axes.set_xlabel("training step")
        axes.set_title("The same script on two devices: how far its weights are from one device's", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main(
    path: Annotated[Path, typer.Argument(help="The picture.")],
    child: Annotated[str, typer.Option(hidden=True)] = "",
):
    """Trains one script in three ways and draws how far its weights are apart."""
    if child:
        train(child, path)
        return
    import numpy as np

    weights = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (repaired, _) in RUNS.items():
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
            environment |= {"TFGPU_REPAIR": "1" if repaired else "0"}
            file = Path(folder) / f"{name}.npy"
            command = [sys.executable, "-m", "benchmarks.same_result", str(file), "--child", name]
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
            weights[name] = np.load(file)
    apart = {name: np.abs(weights[name] - weights["one"]).max(1) for name in ("stock", "tfgpu")}
    for name, found in apart.items():
        print(f"{name}: {found[0]:.1e} after the first step, {found[-1]:.1e} after {len(found)}")
    draw(apart, path)


if __name__ == "__main__":
    typer.run(main)
