"""Draws by `tf.random` where replicas compute the same: their weights stay equal, and what draws is named."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Noisy(keras.optimizers.SGD):
    """Langevin dynamics."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + tf.random.normal(gradient.shape), variable, learning_rate)


class Own(keras.Model):
    """Clips by the gradients' norm, so that it sees the whole batch."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return self.net(x)

    def noise(self, x):
        return tf.random.normal(tf.shape(x))

    def train_step(self, data):
        x = data[0] + self.noise(data[0])
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x)))
        trained = self.net.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, trained), 0.1)
        self.kept.assign(norm + ops.max(x))
        self.optimizer.apply(gradients, trained)
        return {"loss": loss}


class Generates(Own):
    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def noise(self, x):
        return self.generator.normal(tf.shape(x))


class Samples(Own):
    """The trial does not know what draws here."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            table, labels = tf.ones((9, 2)), tf.zeros((tf.shape(data[0])[0], 1), tf.int64)
            loss = ops.mean(tf.nn.sampled_softmax_loss(table, tf.range(9.0), labels, self(data[0]), 3, 9))
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


class Layer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def trained(make, optimizer="sgd", loss=None):
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = make()
        model.compile(optimizer() if callable(optimizer) else optimizer, loss)
    model.fit(X, X[:, :2], batch_size=6, epochs=2, verbose=0)
    return model


def are_equal(model):
    return all(np.array_equal(*(each.numpy() for each in variable.value.values)) for variable in model.variables)


def dense(*before):
    return keras.Sequential([keras.Input((4,)), *before, layers.Dense(2)])


@pytest.mark.parametrize("seed", [None, 1])
def test_an_optimizer_that_draws_keeps_the_replicas_equal_and_is_named(seed, caplog):
    tf.random.set_seed(seed)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert are_equal(trained(dense, Noisy, "mse"))
    assert caplog.text.count("The optimizer draws random numbers with tf.random") == 1


@pytest.mark.sample("Samples")
@pytest.mark.parametrize(("kind", "said"), [(Own, "`Own.train_step` draws"), (Samples, "it draws random numbers")])
def test_a_step_that_draws_and_mixes_rows_keeps_the_replicas_equal_and_is_named(kind, said, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert are_equal(trained(kind))
    assert said in caplog.text


@pytest.mark.parametrize("make", [Generates, lambda: dense(Layer())])
def test_a_generator_of_tensorflow_is_refused(make):
    with pytest.raises(InputError, match=r"tf.random.Generator.*SeedGenerator"):
        trained(make, loss=None if make is Generates else "mse")
