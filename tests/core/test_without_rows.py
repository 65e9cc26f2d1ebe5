"""Batches with fewer rows than replicas: what a replica without rows computes, in loops by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu


def one_device():
    return tfgpu.strategy("one_device", devices=["CPU:0"])


def two_devices():
    return tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])


def crossed():
    first, second = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    layers = keras.layers.HashedCrossing(5), keras.layers.HashedCrossing(5, output_mode="one_hot")
    crosses = [keras.ops.cast(layer([first, second]), "float32") for layer in layers]
    return keras.Model([first, second], keras.layers.Dense(1)(keras.layers.Concatenate()(crosses)))


def separable():
    layers = [keras.layers.SeparableConv1D(3, 2), keras.layers.SeparableConv1D(2, 2), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((5, 2)), *layers, keras.layers.Dense(1)])


class Filtered(keras.layers.Layer):
    """Code of TensorFlow's."""

    def call(self, x):
        padded = tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT")
        return tf.nn.max_pool1d(padded, 2, 2, "SAME"), keras.ops.stft(x[..., 0], 4, 2, 4)[0][..., None]


def filtered():
    inputs = keras.Input((5, 2))
    parts = map(keras.layers.Flatten(), Filtered()(keras.layers.Dense(2)(inputs)))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(parts))))


NUMBERS = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("float32")
ROWS = {crossed: (np.array([[1], [2], [3]]), np.array([[4], [4], [1]])), separable: NUMBERS, filtered: NUMBERS}


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("make", [crossed, separable, filtered])
def test_layers(make, eagerly):
    def weights_on(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = make(), keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        @tfgpu.by_rows
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        def run(x):
            strategy.run(step, args=(x,))

        run = run if eagerly else tf.function(run)
        for x in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(ROWS[make]).batch(2)):
            run(x)
        return model.get_weights()

    for found, expected in zip(weights_on(two_devices()), weights_on(one_device()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_ctc_decoding(eagerly):
    def paths_on(strategy):
        @tfgpu.by_rows
        def step(x):
            lengths = keras.ops.full(keras.ops.shape(x)[:1], 5)
            greedy, beam = (keras.ops.ctc_decode(x, lengths, strategy=way)[0] for way in ("greedy", "beam_search"))
            return keras.ops.sum(greedy), keras.ops.sum(beam)

        def run(x):
            return [strategy.reduce("SUM", each, axis=None) for each in strategy.run(step, args=(x,))]

        run = run if eagerly else tf.function(run)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(NUMBERS).batch(2))
        return [int(each) for x in data for each in run(x)]

    assert paths_on(two_devices()) == paths_on(one_device())
