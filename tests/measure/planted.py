"""Trainings with planted faults, and healthy ones; their profiler traces are in `recorded/`.

    python tests/measure/planted.py             # records all of them again, on an idle machine
    python tests/measure/planted.py eager_step  # one

The tests judge the recordings, which are the same on a busy machine.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.measure import profile
from tfgpu.measure.profiling import trace, verdict
from tfgpu.measure.profiling.hooks import Around, Change, Stage
from tfgpu.measure.profiling.verdict import Report

RECORDED = Path(__file__).with_name("recorded")


def rows(count, batch, size=8):
    x, y = np.ones((count, size), "float32"), np.ones((count, 1), "float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(4)


def model(width, depth, size=8, kind=keras.Model, **how):
    tfgpu.repair_keras()
    x = inputs = keras.Input((size,))
    for _ in range(depth):
        x = keras.layers.Dense(width, "relu")(x)
    made = kind(inputs, keras.layers.Dense(1)(x))
    made.compile("sgd", "mse", **{"jit_compile": False, **how})
    return made


class Watch(keras.callbacks.Callback):
    """Needs each batch, for no reason."""

    def on_train_batch_end(self, batch, logs=None):
        self.last = batch


class Reading(keras.Model):
    """Reads a tensor in each eager step."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.norms = [float(tf.norm(each.value)) for each in self.trainable_variables]
        return logs


def fitted(folder, trained, data, *callbacks, **window) -> Report:
    """Profiles some steps of `fit`."""
    with profile(folder, seconds=0.1, ends=True, **window) as session:
        trained.fit(data, epochs=400, verbose=0, callbacks=list(callbacks))
    return session.report


def tiny_batch(folder):
    return fitted(folder, model(8, 2, steps_per_execution=20), rows(4096, 2), calls=3)


def healthy(folder):
    return fitted(folder, model(768, 3, size=256), rows(4096, 256, 256), calls=3)


def batch_callback(folder):
    return fitted(folder, model(8, 1), rows(2048, 16), Watch(), keras.callbacks.EarlyStopping("loss", patience=999))


def eager_fit(folder):
    return fitted(folder, model(8, 1, kind=Reading, run_eagerly=True), rows(2048, 16), calls=3)


def eager_step(folder):
    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(5)]

    def step(x):
        with tf.GradientTape() as tape:
            for each in weights:
                x = tf.nn.relu(x @ each) / 8.0
            loss = tf.reduce_sum(x)
        for each, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            each.assign_sub(1e-9 * gradient)

    with profile(folder, seconds=0.1) as session:
        for x, _ in rows(400, 8).take(50):
            step(x)
    return session.report


def work_between_steps(folder):
    step = tf.function(lambda x: tf.reduce_sum(x @ x))
    with profile(folder, calls=5, seconds=0.1) as session:
        for _ in range(30):
            step(tf.ones([64, 64]))
            sum(range(1_000_000))
    return session.report


def train_on_batch(folder):
    made, x, y = model(8, 1), np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
    with profile(folder, seconds=0.1) as session:
        for _ in range(400):
            made.train_on_batch(x, y)
    return session.report


PLANTED = {
    each.__name__: each
    for each in (
        tiny_batch,
        healthy,
        batch_callback,
        eager_fit,
        eager_step,
        work_between_steps,
        train_on_batch,
    )
}


def judge(name: str) -> Report:
    """The verdict on a recording."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "host.xplane.pb"
        file.write_bytes(gzip.decompress((RECORDED / f"{name}.xplane.pb.gz").read_bytes()))
        recorded = trace.read(file)
    known = json.loads((RECORDED / f"{name}.json").read_text())
    around = Around(
        **{
            **known,
            "plain": tuple(known["plain"]),
            "changes": tuple(Change(**{**each, "values": tuple(each["values"])}) for each in known["changes"]),
            "stages": tuple(Stage(**each) for each in known["stages"]),
            "devices": tuple(known["devices"]),
            "machine": tuple(known["machine"].items()),
        }
    )
    return verdict.judge(recorded, lambda retraced: around)


def main(names: list[str]) -> None:
    """Records a trace, and prints its verdict."""
    RECORDED.mkdir(exist_ok=True)
    for name in names or PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            report = PLANTED[name](Path(folder))
            (file,) = Path(folder).rglob("*.xplane.pb")
            (RECORDED / f"{name}.xplane.pb.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        (RECORDED / f"{name}.json").write_text(json.dumps(report.around.as_json(), indent=1) + "\n")
        shares = {part: round(report.shares[part], 2) for part in report.shares.parts if report.shares[part] > 0.005}
        print(name, report.verdict, [finding.name for finding in report.findings], shares)


if __name__ == "__main__":
    main(sys.argv[1:])
