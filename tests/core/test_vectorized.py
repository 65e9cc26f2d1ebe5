"""`tf.vectorized_map` and jacobians in a custom training step: several replicas give one device's result."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 7)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh")])

    def call(self, x):
        return self.net(x)

    def learn(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)


class PerExample(Own):
    """Clips each row's gradient by the mean norm of the batch's."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        found = tape.jacobian(losses, self.trainable_variables)
        norms = sum(ops.sum(ops.square(each), list(range(1, len(each.shape)))) for each in found)
        shares = ops.mean(norms) / (norms + 1e-3) / ops.cast(ops.size(norms), "float32")
        self.learn([tf.tensordot(shares, each, 1) for each in found])
        return {"loss": ops.mean(losses), "largest": ops.max(norms)}


class Contractive(Own):
    """A penalty on each row's jacobian: by rows."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            loss = ops.mean(ops.square(inner.batch_jacobian(outputs, x)))
        self.learn(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


class Mapped(Own):
    """Each row's gradient, by `tf.vectorized_map`; logs the norm of their mean."""

    def train_step(self, data):
        def one(row):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(row[None], training=True)))
            return tape.gradient(loss, self.trainable_variables)

        found = [ops.mean(each, 0) for each in tf.vectorized_map(one, data[0])]
        self.learn(found)
        return {"norm": tf.linalg.global_norm(found)}


class Normalized(PerExample):
    def __init__(self):
        super().__init__()
        self.net.add(layers.BatchNormalization())


def trained(kind, replicas):
    keras.utils.set_random_seed(0)
    devices = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.5))
    logs = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *map(np.array, logs.values())]


@pytest.mark.sample("PerExample")
@pytest.mark.parametrize("kind", [PerExample, Mapped, Contractive])
def test_replicas_are_one_device(kind, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        spread = trained(kind, 2)
    for one, other in zip(trained(kind, 1), spread, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert "could not be tried" not in caplog.text


def test_collectives_in_a_jacobian_are_refused():
    with pytest.raises(InputError, match="inside `jacobian`, but BatchNormalization"):
        trained(Normalized, 2)
