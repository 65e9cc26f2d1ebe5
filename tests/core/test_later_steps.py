"""Steps whose losses are warmed up: what has no weight in the first step, and mixes rows, is found before it."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 11)


class Warm(keras.Model):
    """The variance of outputs over the batch counts more from step to step."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])
        self.weight = self.add_weight(shape=(), initializer="zeros", trainable=False, name="weight")

    def call(self, x):
        return self.net(x)

    def warmth(self):
        return ops.minimum(ops.cast(self.optimizer.iterations, "float32") / 4.0, 1.0)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
            loss = loss + self.warmth() * ops.mean(ops.var(outputs, axis=0))
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


class Raised(Warm):
    """A callback raises the weight, which is 0 in the first epoch."""

    def warmth(self):
        return self.weight + 0.0


class Raises(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.weight.assign(0.5)


def trained(kind, devices):
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.3))
    logs = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[Raises()]).history
    return [*model.get_weights(), logs["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Warm, Raised])
def test_what_is_warmed_up_is_found_before_the_first_step(kind, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        found = trained(kind, ["CPU:0", "CPU:1"])
    assert f"`{kind.__name__}.train_step` mixes rows" in caplog.text
    for one, other in zip(trained(kind, None), found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
