"""Floats that stand for "none": code that leaves them out, and so mixes rows, is found though no draw has them."""

import keras
import numpy as np
import pytest
from keras import ops

import tfgpu

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
MISSING = -999.0


def mean_of_known(values, known):
    return ops.sum(ops.where(known, values, 0.0)) / ops.maximum(ops.sum(ops.cast(known, "float32")), 1.0)


class Imputed(keras.layers.Layer):
    """Gives rows that are not known the mean of the others."""

    def call(self, x):
        known = ops.any(x != MISSING, axis=-1, keepdims=True)
        return ops.where(known, x, mean_of_known(x, known))


class Known(keras.metrics.Metric):
    """The mean error of what is known in each batch."""

    def build(self):
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y, p, sample_weight=None):
        if not hasattr(self, "total"):
            self.build()
        self.total.assign_add(mean_of_known(ops.square(y - p), y != MISSING))

    def result(self):
        return self.total + 0.0


class OfKnown(keras.Model):
    """Learns from what is known."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return mean_of_known(ops.square(y - y_pred), y != MISSING)


def of_layer():
    model = keras.Sequential([keras.Input((4,)), Imputed()])
    model.compile(loss="mse")
    return model


def of_metric():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile(loss="mse", metrics=[Known()])
    return model


def of_step():
    model = OfKnown()
    model.compile("sgd")
    return model


NAMED = {
    "layer": (of_layer, "The layer"),
    "metric": (of_metric, "The metric"),
    "step": (of_step, "compute_loss` mixes"),
}


@pytest.mark.parametrize(
    "what", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("layer", "metric")), "step"]
)
def test_code_that_leaves_numbers_out_is_found(what, caplog):
    make, name = NAMED[what]
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = make()
    model.evaluate(X, X, batch_size=8, verbose=0)
    assert name in caplog.text
