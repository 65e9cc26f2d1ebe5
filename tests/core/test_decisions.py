"""Layers that decide by numbers of the batch: a loop until a norm is small, a condition on a mean."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.core.row_mixing import verdicts

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32") * np.linspace(0.2, 2, 6, dtype="float32")[:, None]


class Equilibrium(layers.Layer):
    """Steps towards a fixed point until the batch's residual is small."""

    def call(self, x):
        def step(z, _):
            following = ops.tanh(0.5 * z + x)
            return following, ops.norm(following - z) / ops.norm(following)

        start = ops.zeros_like(x), tf.constant(1.0)
        return tf.while_loop(lambda z, residual: residual > 0.1, step, start, maximum_iterations=30)[0]


class Halts(layers.Layer):
    """Goes on until all rows are done; those that are done stay."""

    def call(self, x):
        def step(z, left):
            return z + left * ops.tanh(x), ops.relu(left - ops.sigmoid(ops.sum(x, -1, keepdims=True)))

        start = ops.zeros_like(x), ops.ones_like(x[:, :1])
        return tf.while_loop(lambda z, left: tf.reduce_any(left > 0), step, start, maximum_iterations=8)[0]


class Chooses(layers.Layer):
    def call(self, x):
        return tf.cond(ops.mean(ops.abs(x)) > 0.9, lambda: 2 * x, lambda: x)


def trained(kind, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), kind(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, X[:, :1], batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Equilibrium, verdicts.ON_ALL_ROWS),
        pytest.param(Chooses, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        (Halts, verdicts.BY_ROWS),
    ],
)
def test_replicas_are_one_device(kind, verdict):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    spread = trained(kind, strategy)
    (piece,) = [each for each in verdicts.of(strategy) if kind.__name__.lower() in each.name.lower()]
    assert piece.verdict == verdict
    for one, other in zip(trained(kind, tf.distribute.get_strategy()), spread, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
