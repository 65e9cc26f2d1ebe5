"""A draw of as many numbers as a replica has rows: one for each row, or so many whatever the batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError


def drawn(*shape):
    return keras.random.normal(shape, seed=7)


class Drawing(keras.layers.Layer):
    """Adds the mean of `count` draws, and noise by row."""

    def __init__(self, count=None, by_row=False):
        super().__init__()
        self.count, self.by_row = count, by_row

    def call(self, x):
        width = x.shape[-1]
        x = x + tf.reduce_mean(drawn(self.count, width), 0) if self.count else x
        return x + drawn(x.shape[0] or tf.shape(x)[0], width) if self.by_row else x


class Negatives(keras.losses.Loss):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def call(self, y_true, y_pred):
        return tf.reduce_mean((y_pred - y_true) ** 2, -1) + y_pred[:, 0] * tf.reduce_sum(drawn(self.count))


class OwnStep(keras.Model):
    count = 0

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            spread = tf.reduce_sum(drawn(self.count))
            loss = self.compute_loss(x, y, self(x, training=True) * spread)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "spread": spread}


def batches(each):
    rows = np.random.default_rng(0).normal(size=(4 * each, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((rows, rows[:, ::-1])).batch(2 * each, drop_remainder=True)


def weights_of(model):
    return np.concatenate([each.ravel() for each in model.get_weights()])


def fitted(strategy, each, layer=None, loss=None, own_step=False):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((3,))
        model = (OwnStep if own_step else keras.Model)(x, keras.layers.Dense(3)(Drawing(**layer or {})(x)))
        model.count = each
        model.compile(keras.optimizers.SGD(0.1), "mse" if loss is None else loss(each))
    model.fit(batches(each), epochs=2, verbose=0)
    return weights_of(model)


def looped(strategy, each):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            found = model(x, training=True) * tf.reduce_sum(drawn(each))
            loss = tf.reduce_sum((found - y) ** 2) / (2 * each)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    run = tf.function(lambda *batch: strategy.run(step, args=batch))
    for batch in strategy.experimental_distribute_dataset(batches(each)):
        run(*batch)
    return weights_of(model)


@pytest.mark.parametrize("each", [4, pytest.param(5, marks=pytest.mark.slow)])  # a trial's parts have 2, 3 or 4 rows
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(lambda s, each: fitted(s, each, {"count": each}), id="layer"),
        pytest.param(lambda s, each: fitted(s, each, {"by_row": True}), id="layer by row"),
        pytest.param(lambda s, each: fitted(s, each, {"count": each + 1, "by_row": True}), id="layer of both"),
        pytest.param(lambda s, each: fitted(s, each, loss=Negatives), id="loss"),
        pytest.param(lambda s, each: fitted(s, each, own_step=True), id="train_step"),
        pytest.param(lambda s, each: fitted(s, each, {"by_row": True}, own_step=True), id="train_step, layer by row"),
        pytest.param(looped, id="loop"),
    ],
)
def test_a_size_that_stays_is_no_row(train, each):
    found, expected = (train(tfgpu.strategy(*how), each) for how in (("mirrored", 2), ("one_device",)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Predicting(keras.Model):
    count = 0

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data) * tf.reduce_sum(drawn(self.count))


def test_predictions():
    def predicted(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            x = keras.Input((3,))
            model = Predicting(x, keras.layers.Dense(3)(x))
            model.count = 5
        return model.predict(batches(5).map(lambda x, y: x), verbose=0)

    found, expected = (predicted(tfgpu.strategy(*how)) for how in (("mirrored", 2), ("one_device",)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(InputError, match="Your code draws 5 random numbers in every batch, and others for each row"):
        fitted(tfgpu.strategy("mirrored", 2), 5, {"count": 5, "by_row": True})
