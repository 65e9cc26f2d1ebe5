"""Numbers that a user's function compares labels with are found wherever the code gets them from."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core.row_mixing.trials import captures, comparison

IN_SET = {31, 32}
settings = types.ModuleType("settings_of_the_user")
settings.IGNORE, settings.unused = 47, 48


class Options:
    ignore = 43
    unused = 44


def by_module(y, p):
    return y != settings.IGNORE


def by_class(y, p):
    return y != Options.ignore


def by_set(y, p):
    return y not in IN_SET


def by_array(values):
    return lambda y, p: y != values


FOUND = {
    "module": (by_module, [47]),
    "class": (by_class, [43]),
    "set": (by_set, [31, 32]),
    "array": (by_array(np.array([29, 30])), [29, 30]),
    "number of NumPy": (by_array(np.int64(28)), [28]),
    "tensor": (by_array(tf.constant([27])), [27]),
    "large array": (by_array(np.arange(100)), []),
    "texts": (by_array(np.array(["a"])), []),
}


@pytest.mark.parametrize("what", FOUND)
def test_numbers_are_found(what):
    function, expected = FOUND[what]
    assert sorted(captures.of(function).numbers) == expected


@pytest.mark.parametrize(("number", "expected"), [(96, 0), (1000, 1000), (10**9, 0)])
def test_numbers_of_steps_beyond_those_that_are_tried(number, expected):
    assert captures.of(lambda step: step > number).beyond == expected


def test_a_variable_in_the_logs_is_a_number():
    rate = keras.Variable(0.5, trainable=False)
    assert comparison.in_float64(rate) == 0.5 and captures.of(lambda y: y * rate).numbers == []


WORDS = ["a", "b", "c"]


def masked(y, outputs):
    """A mean over the labels other than 23, a number that stands nowhere in the code."""
    y = tf.reshape(y, [-1])
    counts = tf.cast(y != 20 + len(WORDS), "float32")
    losses = keras.losses.sparse_categorical_crossentropy(tf.where(counts > 0, y, 0), outputs, from_logits=True)
    return tf.reduce_sum(losses * counts) / tf.reduce_sum(counts)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = masked(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def trained(kind, loss, replicas):
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.integers(0, 3, 24)
    y[[9, 10, 20]] = 23  # not in the rows that the trial sees
    with tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)]).scope():
        model = kind([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", loss)
    logs = model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]
    return [*map(np.ravel, model.get_weights()), logs]


@pytest.mark.parametrize(("kind", "loss"), [(keras.Sequential, masked), (OwnStep, None)], ids=["loss", "step"])
def test_a_label_that_the_code_computes_is_left_out_as_on_one_device(kind, loss):
    one, two = (np.concatenate(trained(kind, loss, replicas)) for replicas in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)
