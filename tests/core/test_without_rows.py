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


def patches(x):
    pictures = tf.reshape(x, (-1, 5, 2, 1))
    volumes = tf.extract_volume_patches(pictures[..., None], [1, 2, 1, 1, 1], [1, 2, 1, 1, 1], "SAME")
    flat = tf.image.extract_patches(pictures, [1, 2, 1, 1], [1, 2, 1, 1], [1, 1, 1, 1], "SAME")
    return tf.reduce_sum(flat**2), tf.reduce_sum(volumes**2)


def ctc_losses(x):
    rows = tf.shape(x)[0]
    labels, lengths = tf.zeros((rows, 1), tf.int32), [tf.fill((rows,), 1), tf.fill((rows,), 5)]
    dense = tf.nn.ctc_loss(labels, x, *lengths, logits_time_major=False, blank_index=1)
    first = tf.sparse.from_dense(labels + 1)
    known = tf.sparse.SparseTensor(first.indices, first.values - 1, first.dense_shape)
    sparse = tf.nn.ctc_loss(known, tf.transpose(x, (1, 0, 2)), None, lengths[1], blank_index=-1)
    return tf.reduce_sum(dense), tf.reduce_sum(sparse)


def ctc_paths(x):
    steps, lengths = tf.transpose(x, (1, 0, 2)), tf.fill((tf.shape(x)[0],), 5)
    (greedy,), _ = tf.nn.ctc_greedy_decoder(steps, lengths)
    beams, scores = tf.nn.ctc_beam_search_decoder(steps, lengths, beam_width=3, top_paths=2)
    found = [tf.cast(tf.reduce_sum(tf.sparse.to_dense(each)), tf.float32) for each in (greedy, *beams)]
    return [*found, tf.reduce_sum(scores)]


def of_sparse(x):
    numbers = tf.cast(x[..., 0] * 3, tf.int64)
    distances = tf.edit_distance(tf.sparse.from_dense(numbers), tf.sparse.from_dense(numbers + 1))
    return tf.reduce_sum(tf.sparse.reduce_sum(tf.sparse.from_dense(x), 1) ** 2), tf.reduce_sum(distances)


def mapped(x):
    return tf.reduce_sum(keras.ops.map(lambda row: {"a": row**2}, x)["a"])


@pytest.mark.sample("ctc_losses-graph", "mapped-eager", "patches-graph")
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("numbers", [patches, ctc_losses, ctc_paths, of_sparse, mapped])
def test_functions_of_rows(numbers, eagerly):
    def found_on(strategy):
        with strategy.scope():
            weight = tf.Variable(1.5)

        @tfgpu.by_rows
        def step(x):
            with tf.GradientTape() as tape:
                values = tf.nest.flatten(numbers(x * weight))
                total = tf.add_n(values)
            gradient = tape.gradient(total, weight)
            return [*values, tf.zeros(()) if gradient is None else gradient]

        def run(x):
            return [strategy.reduce("SUM", each, axis=None) for each in strategy.run(step, args=(x,))]

        run = run if eagerly else tf.function(run)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(NUMBERS).batch(2))
        return [[float(each) for each in run(x)] for x in data]

    found, expected = found_on(two_devices()), found_on(one_device())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
