"""Steps of the user's own in which the replicas meet, notebook cells that run again, functions with buckets."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.core.row_mixing import verdicts
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
TWO = ["CPU:0", "CPU:1"]


class Meeting(keras.Model):
    """A step that compares rows, and logs its loss."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self(data, training=True), tf.distribute.get_replica_context())
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Gathers(Meeting):
    """Each row with each of all replicas, by TensorFlow's own function."""

    def loss_of(self, outputs, replica):
        every = replica.all_gather(outputs, axis=0)
        return ops.mean(ops.square(outputs)) * ops.sum(ops.square(every)) / 10 + ops.mean(every[0] * outputs)


class Counts(Meeting):
    def loss_of(self, outputs, replica):
        rows = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.shape(outputs)[0], tf.float32))
        return ops.mean(ops.square(outputs)) * rows


class Compares(Meeting):
    """The same by tfgpu's function, with which the step is tried."""

    def loss_of(self, outputs, replica):
        every = tf.gather(tfgpu.gather(outputs), [2, 0])
        return ops.mean(ops.square(outputs[:, None] - every[None]))


def trained(kind, strategy, rows=11):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((5,))
        model = kind(inputs, keras.layers.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.05))
    logs = model.fit(X[:rows], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), np.array(logs["loss"])]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Gathers, verdicts.BY_ROWS),
        pytest.param(Counts, verdicts.BY_ROWS, marks=pytest.mark.slow),
        pytest.param(Compares, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
    ],
)
def test_replicas_that_meet_in_a_step(kind, verdict, caplog):
    alone, strategy = trained(kind, tfgpu.strategy("one_device", devices=TWO[:1])), tfgpu.strategy("mirrored", TWO)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        for one, other in zip(alone, trained(kind, strategy), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6, rtol=1e-5)
    (step,) = [piece for piece in verdicts.of(strategy) if piece.name.startswith("step")]
    assert step.verdict == verdict
    assert ("it combines the replicas' rows itself" in caplog.text) == (kind is not Compares)


def test_a_step_whose_replicas_meet_is_not_tried():
    with pytest.raises(InputError, match=r"Gathers.train_step.*could not be tried \(it combines the replicas' rows"):
        trained(Gathers, tfgpu.strategy("mirrored", TWO, unproven="refuse"))


SCRIPT = f"""
import json, sys
import tfgpu
tfgpu.environment.set_logical_devices(2)
sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
from test_own_meetings import Gathers, trained
found = trained(Gathers, tfgpu.strategy("multi_worker", ["CPU:0", "CPU:1"]))
print(json.dumps([each.tolist() for each in found]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_that_meet_in_a_step(together):
    """Two workers of two devices: the order of replicas is not the one of the batch's rows."""
    alone = trained(Gathers, tfgpu.strategy("one_device", devices=TWO[:1]))
    answers = together(SCRIPT, {"worker": 2}, timeout=550)
    for found in answers.values():
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_allclose(one, np.array(other), atol=2e-6, rtol=1e-5)


CELL = """
import keras, numpy as np, tfgpu

keras.utils.set_random_seed(0)
strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
with strategy.scope():
    class Centered(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), Centered(), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    history = model.fit(X, X[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0).history
"""


@pytest.mark.slow
def test_a_notebook_s_cell_that_runs_again_gives_the_same():
    names, found = {"X": X}, []
    for _ in range(2):
        exec(CELL, names)
        found.append([*names["model"].get_weights(), *names["history"].values()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


class Bucketed(keras.layers.Layer):
    """Works on sequences of three lengths, each by a trace of its own of a tf.function."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.scaled = tf.function(lambda x: x * self.scale, reduce_retracing=False)

    def call(self, x):
        parts = [self.scaled(x[:, :length]) for length in (2, 4, 5)]
        return ops.concatenate([ops.sum(part, 1, keepdims=True) for part in parts], 1)


@pytest.mark.slow
def test_functions_with_buckets_in_a_layer(caplog):
    def fitted(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((5, 4)), Bucketed(), keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        rows = np.random.default_rng(1).normal(size=(11, 5, 4)).astype("float32")
        model.fit(rows, X[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        one, two = (fitted(tfgpu.strategy(*how)) for how in (("one_device", TWO[:1]), ("mirrored", TWO)))
    for here, there in zip(one, two, strict=True):
        np.testing.assert_allclose(here, there, atol=2e-6)
    assert "bucketed" not in caplog.text
