"""Models whose data are sparse or ragged are built on such rows, as without a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

DATA = np.random.default_rng(0)
X = np.where(DATA.random((10, 6)) < 0.4, DATA.normal(size=(10, 6)), 0).astype("float32")
Y = np.arange(10) % 3
SPARSE = tf.sparse.from_dense(X)
RAGGED = tf.ragged.constant([[1 + at % 4] * (1 + at % 3) for at in range(10)])


class Product(keras.Model):
    """Makes its weights in `build`."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(3)

    def build(self, shape):
        self.table = self.add_weight(shape=(6, 4), name="table")
        self.last.build((None, 4))

    def call(self, x):
        return self.last(tf.sparse.sparse_dense_matmul(x, tf.convert_to_tensor(self.table)))


class Mean(Product):
    def call(self, x):
        return self.last(tf.reduce_mean(tf.gather(tf.convert_to_tensor(self.table), x), 1))


def dense():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])


def squares(y_true, y_pred):
    return tf.reduce_mean(tf.square(tf.sparse.to_dense(y_true) - y_pred), -1)


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(strategy, make, loss, rows) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile("sgd", loss)
    model.fit(tf.data.Dataset.from_tensor_slices(rows).batch(4), epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    ("make", "loss", "rows"),
    [
        (dense, lambda: squares, (X, SPARSE)),
        pytest.param(Product, classes, (SPARSE, Y), marks=pytest.mark.slow),
        pytest.param(Mean, classes, (RAGGED, Y), marks=pytest.mark.slow),
    ],
    ids=["labels", "sparse", "ragged"],
)
def test_replicas_are_one_device(make, loss, rows):
    plain = trained(tf.distribute.get_strategy(), make, loss(), rows)
    found = trained(tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]), make, loss(), rows)
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
