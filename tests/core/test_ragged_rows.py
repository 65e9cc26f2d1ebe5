"""Ragged rows under `fit`, `evaluate` and `predict`: replicas give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

ROWS = tf.ragged.constant(
    [[1, 2], [3], [1, 3, 4, 2], [], [2], [4, 1], [1], [3, 3], [2, 1, 4], [4], [1, 2, 3]], dtype=tf.int64
)
Y = np.random.default_rng(1).integers(0, 3, 11)


class Bag(keras.Model):
    """Classes by the mean of each row's vectors; built by its first batch."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(6, 4), initializer="random_normal")
        self.norm, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(3)

    def call(self, rows, training=False):
        table = tf.convert_to_tensor(self.table)
        sums = tf.reduce_sum(tf.ragged.map_flat_values(lambda ids: tf.gather(table, ids), rows), 1)
        means = tf.math.divide_no_nan(sums, tf.cast(rows.row_lengths()[:, None], tf.float32))
        return self.head(self.norm(means, training=training))


def trained(devices, ways):
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model = tfgpu.by_rows(Bag)()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    if ways == "on_batch":
        found = [model.train_on_batch(ROWS[at : at + 4], Y[at : at + 4]) for at in range(0, 11, 4)]
        return [*model.get_weights(), *found]
    history = model.fit(ROWS, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    found = [history["loss"], history["accuracy"], *model.evaluate(ROWS, Y, batch_size=4, verbose=0)]
    return [*model.get_weights(), *found, model.predict(ROWS, batch_size=4, verbose=0)]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ways"), [(2, "fit"), (4, "fit"), (2, "on_batch")])
def test_a_model_that_its_first_ragged_batch_builds(replicas, ways):
    for one, other in zip(trained(None, ways), trained([f"CPU:{at}" for at in range(replicas)], ways), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


TEXTS = np.array(["a b", "", "b b a a b a a", "c", "a", "b", "a a a", "b", "a b"])
TARGETS = np.random.default_rng(2).normal(size=(9, 2)).astype("float32")


def reads(strategy, *, is_masked=False):
    """A model of texts whose padding counts if it has no mask."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        texts = keras.layers.TextVectorization(vocabulary=["a", "b"])
        table = keras.layers.Embedding(5, 3, mask_zero=is_masked)
        reads = keras.layers.GRU(3) if is_masked else keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((), dtype="string"), texts, table, reads, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.slow
def test_texts_are_padded_to_the_longest_of_the_batch():
    def trained(strategy):
        model = reads(strategy)
        rows = tf.data.Dataset.from_tensor_slices((TEXTS, TARGETS)).batch(8)
        model.fit(rows, verbose=0)
        found = model.train_on_batch(tf.constant(TEXTS[:3]), TARGETS[:3])
        return [*model.get_weights(), found, model.evaluate(rows, verbose=0), model.predict(rows, verbose=0)]

    two = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    for one, other in zip(trained(tf.distribute.get_strategy()), trained(two), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


class Lengths(keras.layers.Layer):
    """The mean length of a text's words, where missing words count as empty ones."""

    def call(self, texts):
        words = tf.sparse.to_dense(tf.strings.split(texts).to_sparse(), default_value="")
        return tf.reduce_mean(tf.cast(tf.strings.length(words), tf.float32), 1, keepdims=True)

    def compute_output_shape(self, shape):
        return (*shape, 1)


def test_sparse_words_are_padded_to_the_longest_of_the_batch():
    def found(strategy):
        with strategy.scope():
            texts = keras.Input((), dtype="string")
            model = keras.Model(texts, tfgpu.by_rows(Lengths())(texts))
        return model.predict_on_batch(tf.constant(TEXTS[:5]))

    two = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    np.testing.assert_array_equal(found(two), found(tf.distribute.get_strategy()))


class Attends(keras.Model):
    """Attention over each row's vectors, with a mask as wide as the batch's longest row."""

    def __init__(self):
        super().__init__()
        self.table, self.head = keras.layers.Embedding(6, 4), keras.layers.Dense(3)
        self.attention = keras.layers.MultiHeadAttention(2, 3)

    def call(self, rows):
        mask = tf.sequence_mask(rows.row_lengths())
        vectors = self.table(rows.to_tensor())
        seen = self.attention(vectors, vectors, attention_mask=mask[:, None])
        return self.head(tf.reduce_sum(seen * tf.cast(mask, tf.float32)[..., None], 1))


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_mask_of_lengths_is_as_wide_as_the_longest_row_of_the_batch(replicas):
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = tfgpu.by_rows(Attends)()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss)
        losses = model.fit(ROWS, Y, batch_size=4, shuffle=False, verbose=0).history["loss"]
        return [*model.get_weights(), losses]

    several = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    for one, other in zip(trained(tf.distribute.get_strategy()), trained(several), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("eagerly", [False, True])
def test_texts_in_a_loop_whose_last_batch_leaves_replicas_without_rows(is_masked, eagerly):
    def trained(strategy):
        model = reads(strategy, is_masked=is_masked)
        with strategy.scope():
            loss_of = keras.losses.MeanSquaredError()

        @tfgpu.by_rows
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        def run(batch):
            strategy.run(step, args=batch)

        run = run if eagerly else tf.function(run)
        rows = tf.data.Dataset.from_tensor_slices((TEXTS, TARGETS)).batch(8)
        for batch in strategy.experimental_distribute_dataset(rows):
            run(batch)
        return model.get_weights()

    four = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(4)])
    for one, other in zip(trained(tf.distribute.get_strategy()), trained(four), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_ragged_rows_of_many_axes_keep_what_a_shape_says():
    values = tf.ragged.constant([[[1, 2], [3]], [], [[4]], [[5], [6, 7, 8], [9]]])
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])

    def found(shape, default):
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: values[2 * context.replica_id_in_sync_group :][:2]
        )
        step = tfgpu.by_rows(lambda rows: rows.to_tensor(default, shape=shape))
        return strategy.gather(tf.function(lambda: strategy.run(step, args=(rows,)))(), axis=0)

    for shape in (None, (None, 4, None), [None, None, 2], tf.TensorShape([None, None, None])):
        np.testing.assert_array_equal(found(shape, 7), values.to_tensor(7, shape=shape))
