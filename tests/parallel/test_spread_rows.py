"""Layers that look at several rows, within a model that is spread over devices: on all rows, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.parallel import Mesh, apply, place

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 8)).astype("float32"), RNG.normal(size=(50, 1)).astype("float32")


class Balanced(layers.Layer):
    """Adds a loss that is no mean over rows."""

    def call(self, x):
        self.add_loss(ops.sum(ops.mean(x, axis=0) ** 2))
        return x


class Compared(layers.Layer):
    """Each row is a mixture of all, by its likeness to them."""

    def call(self, x):
        return x + ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


class Normed(layers.Layer):
    """A batch normalization by hand, which counts rows besides."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        mean = self.mean
        if training:
            mean = ops.mean(x, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return self.scale * (x - mean)


class Block(layers.Layer):
    """Layers within a layer."""

    def __init__(self, kind, **how):
        super().__init__(**how)
        self.dense, self.inner = layers.Dense(8, "tanh", name="dense"), kind(name="inner")
        self.drop = layers.Dropout(0.2, seed=3)

    def build(self, shape):
        self.dense.build(shape)
        self.inner.build(shape)

    def call(self, x, training=None):
        return self.drop(self.inner(self.dense(x)), training=training)


def functional(*kinds):
    inputs = x = keras.Input((8,))
    for at, kind in enumerate(kinds):
        x = layers.Dense(8, "relu", name=f"before_{at}")(kind(name=f"mixing_{at}")(Block(kind, name=f"block_{at}")(x)))
    x = layers.Dense(8, "gelu", name="up")(x)
    return keras.Model(inputs, layers.Dense(1, name="out")(layers.Dense(6, name="down")(x)))


class Own(keras.Model):
    """A `call` and a `train_step` of its own."""

    def __init__(self):
        super().__init__()
        self.blocks, self.out = [Block(Compared), Block(Balanced)], layers.Dense(1)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.out(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x, y, found) + 0.1 * ops.sum(ops.mean(found, axis=0) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own():
    model = Own()
    model(X[:2])
    return model


def made(make):
    keras.utils.set_random_seed(1)
    return make()


def outcome(model):
    """History, weights, evaluation and predictions; the last batch has 2 rows."""
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.01), "mse", jit_compile=False)
    history = model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0).history["loss"]
    return history, model.get_weights(), model.evaluate(X, Y, 16, verbose=0), model.predict(X, 16, verbose=0)


def assert_alike(make, spread):
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        expected = outcome(made(make))
    found = outcome(spread(made(make)))
    for mine, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def on_mesh(zero=0, **sizes):
    mesh = Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])
    more = {"microbatches": 2} if mesh.pipeline > 1 else {}
    return lambda model: apply(model, mesh, zero=zero, **more)


LAYOUTS = {
    "data 4": on_mesh(data=4),
    "data 2 x tensor 2": on_mesh(data=2, tensor=2),
    "pipeline 2": on_mesh(pipeline=2),
    "data 2 x pipeline 2": on_mesh(data=2, pipeline=2),
    "zero 2": on_mesh(2, data=2),
    "zero 3": on_mesh(3, data=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_what_one_device_learns(layout):
    assert_alike(lambda: functional(Compared, Normed, Balanced), LAYOUTS[layout])


@pytest.mark.parametrize(
    "spread", [on_mesh(data=2), on_mesh(data=4), lambda model: place(model, {"*": ("CPU:0", "CPU:1")})]
)
def test_a_model_with_a_call_and_a_step_of_its_own(spread):
    assert_alike(own, spread)
