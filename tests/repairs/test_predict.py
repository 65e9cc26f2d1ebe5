"""`predict` of outputs that have no rows: they come once a batch, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu import InputError

X = np.random.default_rng(0).normal(size=(37, 5)).astype("float32")


class Book(keras.Model):
    """Gives its codebook beside each row's output, and what the codebook says of each row."""

    def __init__(self, size):
        super().__init__()
        self.dense, self.size = layers.Dense(4), size

    def build(self, shape):
        self.dense.build(shape)
        self.book = self.add_weight(shape=(self.size, 4), name="book")

    def call(self, x):
        repeated = ops.broadcast_to(self.book[:1], (ops.shape(x)[0], 4))
        return {"row": self.dense(x), "book": self.book + 0.0, "repeated": repeated}


class Spread(keras.Model):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def call(self, x):
        return {"row": x, "spread": ops.reshape(ops.std(x, 0)[:3], self.shape) if self.shape else ops.std(x)}


def predicted(strategy, make, rows, **how):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse", **how)
        model.build((None, 5))
    return model.predict(X[:rows], batch_size=8, verbose=0)


@pytest.mark.sample("9-3")
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("rows", [16, 37, 9, 1])
def test_weights_come_once_a_batch(rows, size):
    """A codebook of 4 has as many rows as a replica of two; of 8, as the batch. 9 rows leave a replica without any."""
    expected = predicted(tfgpu.strategy("one_device", "CPU:0"), lambda: Book(size), rows)
    found = predicted(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), lambda: Book(size), rows)
    assert len(found["book"]) == size * -(-rows // 8)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda: Spread((3, 1)), {}),
        (lambda: Spread(()), {}),
        (lambda: Book(3), {"run_eagerly": True}),
        (lambda: Book(3), {"jit_compile": True}),
    ],
    ids=["of-rows", "scalar", "eager", "xla"],
)
def test_other_outputs_without_rows(make, how):
    expected = predicted(tfgpu.strategy("one_device", "CPU:0"), make, 16, **how)
    found = predicted(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), make, 16, **how)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_what_cannot_be_put_together_is_named():
    """A mark says that the model is by rows, and it is not."""
    with pytest.raises(InputError, match=r"Output \d of `predict`, of shape \(.*\), has no rows"):
        predicted(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), lambda: tfgpu.by_rows(Spread((3, 1))), 16)


def test_sparse_rows():
    x = tf.sparse.from_dense(np.eye(6, dtype="float32")[np.arange(19) % 6])
    answers = []
    for strategy in (tfgpu.strategy("one_device", "CPU:0"), tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"])):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((6,), sparse=True), keras.layers.Dense(3)])
        answers.append(model.predict(x, batch_size=8, verbose=0))
    np.testing.assert_allclose(answers[1], answers[0], rtol=0, atol=1e-6)
