"""A batch whose size is known while the step is traced: draws and losses of one row per replica equal one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import strategies

X = np.arange(8.0, dtype="float32").reshape(8, 1) / 8


class Noisy(keras.layers.Layer):
    """Adds what `keras.random` draws for a shape of numbers."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        rows = x.shape[0] or 1  # none while the model is built
        return x + keras.random.normal((rows, 1), seed=self.seed) + self.kernel


def drawn(strategy, *, batch):
    """What the layer adds to each row in one step of training, by the gradient of a loss in it."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Noisy()])
    data = tf.data.Dataset.from_tensor_slices((X[:batch], X[:batch])).batch(batch, drop_remainder=True)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: (p - y) ** 2 * tf.constant([1.0]))
    model.fit(data, verbose=0)
    return model.get_weights()[0].item()


@pytest.mark.sample("8-2")
@pytest.mark.parametrize("batch, replicas", [(8, 2), (8, 4), (4, 4)])
def test_draws_of_a_static_shape_differ_by_row_as_on_one_device(batch, replicas):
    alone = drawn(strategies.one_device("CPU:0"), batch=batch)
    assert drawn(strategies.mirrored(replicas), batch=batch) == pytest.approx(alone, abs=1e-6)


class Vector(keras.Model):
    """Its loss has a value for each row, whose gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2, axis=-1)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(loss)}


def trained(strategy, *, batch, is_static):
    with strategy.scope():
        model = Vector()
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.01))
    data = tf.data.Dataset.from_tensor_slices((X[:batch], 3 * X[:batch])).batch(batch, drop_remainder=is_static)
    model.fit(data, verbose=0)
    return model.get_weights()[0].item()


@pytest.mark.sample("2-True")
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_an_unreduced_loss_of_one_row_per_replica_is_a_sum(replicas, is_static):
    alone = trained(strategies.one_device("CPU:0"), batch=replicas, is_static=is_static)
    assert trained(strategies.mirrored(replicas), batch=replicas, is_static=is_static) == pytest.approx(alone, abs=1e-6)


class OfOneGraph(keras.layers.Layer):
    """Passes messages along the edges of one graph, whose nodes are all rows of a batch: it takes no fewer."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.edges = np.random.default_rng(0).uniform(size=(10, 10)).astype("float32")

    def call(self, x):
        return tf.constant(self.edges) @ self.dense(x)


@pytest.mark.parametrize("trains", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_layer_for_one_batch_size_gets_all_rows(trains):
    x, found = np.random.default_rng(1).normal(size=(10, 4)).astype("float32"), []
    for strategy in (tfgpu.strategy("one_device", "CPU:0"), tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), OfOneGraph(), OfOneGraph()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        if trains:
            model.fit(x, x[:, :3], batch_size=10, epochs=2, verbose=0)
            found.append([model.evaluate(x, x[:, :3], batch_size=10, verbose=0), *model.get_weights()])
        else:
            found.append([model.predict(x, batch_size=10, verbose=0)])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)
