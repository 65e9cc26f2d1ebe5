"""`predict` and `predict_on_batch` under replicas: what mixes rows, or gives no rows, is one device's."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu

X = np.random.default_rng(0).normal(size=(17, 4)).astype("float32")
TWO = ["CPU:0", "CPU:1"]


class Center(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, 0)


class Seen(layers.Layer):
    """Counts the rows that it has seen."""

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.n.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x / (1 + self.n)


class Drawn(layers.Layer):
    """Dropout that stays on."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.seed)


class Total(layers.Layer):
    def call(self, x):
        return ops.sum(x, 0)


class Normed(keras.Model):
    """A `predict_step` that divides by something of the whole batch."""

    def predict_step(self, data):
        outputs = super().predict_step(data)
        return outputs / ops.sum(outputs * outputs)


class Labels(keras.Model):
    """A `predict_step` by rows, and a number that all batches share."""

    def predict_step(self, data):
        outputs = super().predict_step(data)
        return {"label": ops.argmax(outputs, -1), "p": ops.softmax(outputs), "scale": ops.sum(self.weights[0])}


class Own(keras.Model):
    """Is built by its first call, and gives outputs with and without rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        outputs = self.dense(x)
        return {"rows": outputs, "sum": ops.sum(outputs, 0), "mean": ops.mean(outputs)}


class OwnStep(Own):
    def predict_step(self, data):
        return ops.softmax(super().predict_step(data)["rows"])


class Words(keras.Model):
    """Returns texts, which a trial does not compare."""

    def predict_step(self, data):
        return tf.strings.as_string(ops.argmax(super().predict_step(data), -1))


class Pieces(keras.Model):
    """Returns rows of unequal lengths."""

    def predict_step(self, data):
        return tf.RaggedTensor.from_tensor(ops.relu(super().predict_step(data)), padding=0.0)


def functional(kind, *middle):
    inputs = keras.Input((4,))
    outputs = layers.Dense(3)(inputs)
    for layer in middle:
        outputs = layer()(outputs)
    return kind(inputs, outputs)


MODELS = {
    "center": lambda: functional(keras.Model, Center, lambda: layers.Dense(3)),
    "seen": lambda: functional(keras.Model, Seen),
    "drawn": lambda: functional(keras.Model, Drawn),
    "total": lambda: functional(keras.Model, Total),
    "normed": lambda: functional(Normed),
    "labels": lambda: functional(Labels),
    "own": Own,
    "own step": OwnStep,
    "plain": lambda: functional(keras.Model),
    "recurrent": lambda: functional(
        keras.Model, lambda: layers.Reshape((3, 1)), lambda: layers.Bidirectional(layers.LSTM(2))
    ),
}


def built(make, strategy, options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse", **options)
    return model


def outputs(make, strategy, rows=17, **options):
    model = built(make, strategy, options)
    whole = model.predict(X[:rows], batch_size=5, verbose=0)  # the last batch has rows for some replicas alone
    return [keras.tree.flatten(each) for each in (whole, model.predict_on_batch(X[:7]), model.predict_on_batch(X[:1]))]


def check(make, replicas=2, **options):
    tfgpu.repair_keras()
    mirrored = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)])
    one, many = (outputs(make, each, **options) for each in (tf.distribute.get_strategy(), mirrored))
    for found, expected in zip(many, one, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.sample("center")
@pytest.mark.parametrize("name", list(MODELS))
def test_replicas_predict_what_one_device_does(name):
    check(MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.parametrize("name", ["center", "normed", "own", "plain"])
def test_ways_of_running(name, how):
    check(MODELS[name], **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["center", "normed", "labels", "total"])
def test_four_replicas_and_batches_of_one_size(name):
    check(MODELS[name], replicas=4, rows=10)


def test_what_it_says(caplog):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with caplog.at_level(logging.WARNING):
        built(MODELS["labels"], strategy, {}).predict(X, verbose=0)
        assert "sees the whole batch" not in caplog.text
        built(MODELS["normed"], strategy, {}).predict(X, verbose=0)
    assert "`Normed.predict_step` mixes rows of the batch (what it returns" in caplog.text


@pytest.mark.parametrize("kind", [Words, pytest.param(Pieces, marks=pytest.mark.slow)])
def test_what_is_no_number_is_predicted_by_rows_with_a_warning(kind, caplog):
    tfgpu.repair_keras()
    strategies = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    models = [built(lambda: functional(kind), each, {}) for each in strategies]
    with caplog.at_level(logging.WARNING):
        one, two = (model.predict(X, batch_size=6, verbose=0) for model in models)
    assert "It runs on each replica's rows" in caplog.text
    one, two = ((each.to_list() if hasattr(each, "to_list") else each.tolist()) for each in (one, two))
    assert one == two


def test_a_mark_settles_it(caplog):
    class Marked(Normed):
        @tfgpu.by_rows
        def predict_step(self, data):
            return super().predict_step(data)

    model = built(lambda: functional(Marked), tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]), {})
    with caplog.at_level(logging.WARNING):
        found = model.predict(X[:4], verbose=0)
    assert "predict_step" not in caplog.text
    for part in (found[:2], found[2:]):  # each replica divides its rows by their own sum
        raw = part / np.sum(part * part)
        np.testing.assert_allclose(raw / np.sum(raw * raw), part, rtol=1e-4)


def test_a_refusal_where_a_step_cannot_be_tried():
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"], unproven="refuse")
    with pytest.raises(tfgpu.InputError, match=r"Words\.predict_step.*could not be tried"):
        built(lambda: functional(Words), strategy, {}).predict(X, verbose=0)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_model_that_was_never_called_is_built_before_the_replicas_run(how, caplog):
    class Never(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = layers.Dense(5), layers.Dense(3)

        def call(self, x):
            return self.head(self.hidden(x))

        def predict_step(self, data):
            return 2 * super().predict_step(data)

    def predicted(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = Never()
            model.compile(**how)
        return model.predict(X, batch_size=6, verbose=0)

    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        one, two = (predicted(tfgpu.strategy(*each)) for each in (("one_device", TWO[:1]), ("mirrored", TWO)))
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert "could not be tried" not in caplog.text
