"""A picture of a profile: `python -m benchmarks.planted PATH.svg` profiles a `fit` with a slow input and draws it."""

import sys
import tempfile
import timeit
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.core import block_event
from tfgpu.measure import profile
from tfgpu.measure.profiling import writing


def augment(x, y):
    """Takes as long as a few steps' rows should not."""
    for _ in range(12):
        x = tf.linalg.matmul(x, tf.eye(128))
    return x, y


def main() -> None:
    """Profiles, prints the verdict and what a marker costs without a profiler, and draws."""
    rows = np.ones((1024, 128, 128), "float32"), np.ones((1024, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices(rows).map(augment).batch(32)
    with tfgpu.strategy("one_device").scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((128, 128)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    with tempfile.TemporaryDirectory() as folder, profile(folder, ends=True) as session:
        model.fit(data, epochs=100, verbose=0)
    print(writing.text(session.report))
    cost = min(timeit.repeat(_mark, number=10_000, repeat=5)) / 10_000
    print(f"A marker without a profiler: {cost * 1e6:.2f} µs (the least of 5 times 10,000)")
    for path in sys.argv[1:]:
        Path(path).write_text(writing.svg(writing.timeline(session.report)) + "\n")


def _mark() -> None:
    with block_event.steps_begin(0, 1, "train", "pace", jit=False):
        pass


if __name__ == "__main__":
    main()
