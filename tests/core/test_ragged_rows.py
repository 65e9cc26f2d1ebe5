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
