"""`train_on_batch` under replicas: shapes tell how many rows a replica has, and the step's arguments do not."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu

X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - ops.mean(x, 0)


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    @tf.function
    def scaled(self, x):
        return x * self.scale

    def call(self, x):
        return self.scaled(x)


def trained(strategy, sizes):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4), Scaled(), Centered(name="centered"), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.5), "mse")
    logs = [model.train_on_batch(X[:rows], Y[:rows]) for rows in sizes]
    return [*model.get_weights(), *map(np.array, logs)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([8, 8], id="full"),
        pytest.param([8, 5, 3, 1], id="uneven", marks=pytest.mark.slow),
        pytest.param([1], id="fewer rows than replicas", marks=pytest.mark.slow),
    ],
)
def test_layers_of_the_user_s_own(sizes, caplog):
    alone = trained(tfgpu.strategy("one_device", devices=["CPU:0"]), sizes)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        spread = trained(tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]), sizes)
    for one, other in zip(alone, spread, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tfgpu")]
    assert len(said) == 1 and "'centered'" in said[0] and "16 bytes for each row" in said[0]
