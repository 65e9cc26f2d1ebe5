"""Data, metrics and loops in forms that Keras or TensorFlow allow and that are easily forgotten."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

X = np.random.default_rng(0).normal(size=(18, 4)).astype("float32")
Y = np.arange(18) % 3


@pytest.fixture(params=["one", "four"])
def strategy(request):
    tfgpu.repair_keras()
    if request.param == "one":
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])


def build(strategy, *between, **compiled):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *[make() for make in between], keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, **compiled)
    return model


def plain_weights():
    model = build(tf.distribute.get_strategy())
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def same(a, b):
    return all(np.abs(x - y).max() <= 1e-6 for x, y in zip(a, b, strict=True))


@pytest.mark.sample("four")
def test_elements_that_are_named_tuples(strategy):
    pair = collections.namedtuple("pair", "x y")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(pair).batch(8)
    model = build(strategy)
    model.fit(data, verbose=0)
    assert same(model.get_weights(), plain_weights())


@pytest.mark.sample("four")
def test_elements_with_none_for_weights(strategy):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(lambda x, y: (x, y, None))
    model = build(strategy)
    model.fit(data, verbose=0)
    assert same(model.get_weights(), plain_weights())


@pytest.mark.slow
@pytest.mark.sample("four")
def test_a_metric_whose_result_takes_arguments(strategy):
    class Scaled(keras.metrics.Mean):
        def result(self, factor=1.0):
            return super().result() * factor

    class Own(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            self.scaled.update_state(data[0][:, 0])
            return {"once": self.scaled.result(), "nothing": self.scaled.result(0.0)}

    with strategy.scope():
        model = Own([keras.Input((4,)), keras.layers.Dense(1)])
        model.scaled = Scaled()
        model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=18, verbose=0).history
    assert history["once"] == pytest.approx([X[:, 0].mean()], abs=1e-6) and history["nothing"] == [0.0]


@pytest.mark.slow
def test_dropout_in_a_loop_around_strategy_run():
    tfgpu.repair_keras()
    four, found = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)]), {}
    for name, under in (("plain", tf.distribute.get_strategy()), ("four", four)):
        model = build(under, lambda: keras.layers.Dropout(0.5, seed=3))

        def step(weights, x, y, model=model):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
                loss = tf.reduce_sum(losses) * weights[0] / 8
            variables = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        @tf.function
        def epoch(data, under=under, step=step):
            for x, y in data:
                under.run(step, args=(tf.constant([1.0, 2.0]), x, y))  # the first argument has no rows of the batch

        data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
        epoch(under.experimental_distribute_dataset(data))
        found[name] = model.get_weights()
    assert same(found["plain"], found["four"])
