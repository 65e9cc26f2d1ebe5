"""Steps whose losses are warmed up: what has no weight in the first step, and mixes rows, is found before it."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.core.row_mixing.trials.part_trial import Trial
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.state import layer_state
from tfgpu.core.state.trial_scope import Apart

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 11)


class Warm(keras.Model):
    """The variance of outputs over the batch counts more from step to step."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])
        self.weight = self.add_weight(shape=(), initializer="zeros", trainable=False, name="weight")

    def call(self, x):
        return self.net(x)

    def warmth(self):
        return ops.minimum(ops.cast(self.optimizer.iterations, "float32") / 4.0, 1.0)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
            loss = loss + self.warmth() * ops.mean(ops.var(outputs, axis=0))
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


class Waits(Warm):
    """The variance counts from the 120th step on."""

    start = 120

    def warmth(self):
        return ops.cast(self.optimizer.iterations >= self.start, "float32")


class Sometimes(Warm):
    """The variance counts in every fifth step."""

    def warmth(self):
        return ops.cast(self.optimizer.iterations % 5 == 3, "float32")


class WaitsByOwn(Waits):
    """Counts its steps in a float."""

    def warmth(self):
        self.weight.assign_add(1.0)
        return ops.cast(self.weight > self.start, "float32")


class Raised(Warm):
    """A callback raises the weight, which is 0 in the first epoch."""

    def warmth(self):
        return self.weight + 0.0


class RaisedOwn(Raised):
    """A callback raises a variable of TensorFlow's own."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(0.0)


class Falls(Warm):
    """Learns from the share of rows whose losses are smallest; a callback makes it 0.5, and at first it is 1."""

    def __init__(self):
        super().__init__()
        self.weight.assign(1.0)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            count = ops.ceil(self.weight * ops.cast(ops.size(losses), "float32"))
            loss = ops.mean(ops.sort(losses)[: ops.cast(count, "int32")])
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


class Raises(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.weight.assign(0.5)


def trained(kind, devices):
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.3))
    logs = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[Raises()]).history
    return [*model.get_weights(), logs["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Waits, WaitsByOwn, Sometimes])
def test_what_waits_for_more_steps_than_a_trial_runs_is_found(kind, caplog):
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = kind()
        model.compile("sgd")
    model.fit(X[:4], Y[:4], batch_size=4, verbose=0)
    assert f"`{kind.__name__}.train_step` mixes rows" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Warm, Raised, RaisedOwn, Falls])
def test_what_is_warmed_up_is_found_before_the_first_step(kind, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        found = trained(kind, ["CPU:0", "CPU:1"])
    assert f"`{kind.__name__}.train_step` mixes rows" in caplog.text
    for one, other in zip(trained(kind, None), found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_variables_of_tensorflow_are_as_after_many_steps_until_restored():
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        weight, steps = tf.Variable(0.0), tf.Variable(2, trainable=False)
    plain = [weight, steps, tf.Variable([0.0]), tf.Variable(False), tf.Variable(3.0)]
    copies = [*strategy.experimental_local_results(weight), *plain[1:]]
    scope = Apart(plain, is_later=True)
    np.testing.assert_allclose([float(each.numpy().squeeze()) for each in copies], [0.7, 0.7, 99, 0, 0, 3])
    steps.assign_add(1)
    assert [(each.before, each.after) for each in scope.assigned(layer_state.Noted()).values()] == [(99, 100)]
    scope.restore()
    assert [float(each.numpy().squeeze()) for each in copies] == [0, 0, 2, 0, 0, 3]


def test_a_step_that_cannot_run_as_after_many_steps_is_tried_on_all_draws():
    """A variable of TensorFlow's own that is a place in a list."""
    seen, place = [], tf.Variable(0)

    class Step(Trial):
        def _batches(self):
            return iter(range(4))

        def _recorded(self, batch, start, stop, *, seed=0):
            found = Recorder(1.0, start, stop)
            with self._sandbox.around(found, seed):
                [None][int(place)]
            seen.append(batch)
            return found

    assert Step(lambda: place).run().differs is None and set(seen) == {0, 2}
