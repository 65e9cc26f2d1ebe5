"""Averages of weights: hand-computed, on replicas, and after a resume."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint, EvaluateAverages
from tfgpu.errors import InputError, Preempted

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, size=(22, 4)).astype("float32")
Y = X[:, :1] - X[:, 1:2]


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def make(replicas=1, **optimizer):
    names = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored" if replicas > 1 else "one_device", devices=names)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(5), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, **optimizer), "mse")
    return model


class Weights(keras.callbacks.Callback):
    """Records the trainable weights at the end of each epoch."""

    every_batch = has_memory = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([v.numpy() for v in self.model.trainable_variables])


class Stops(keras.callbacks.Callback):
    """Preempts the process at the first block of an epoch's training or validation."""

    every_batch = has_memory = False

    def __init__(self, epoch, *, in_validation=False):
        super().__init__()
        self.at, self.in_validation, self.epoch = epoch, in_validation, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def ask(self, in_validation):
        if self.epoch == self.at and in_validation == self.in_validation:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, batch, logs=None):
        self.ask(False)

    def on_test_batch_end(self, batch, logs=None):
        self.ask(True)


def fit(model, *callbacks, epochs=5):
    return model.fit(batches(), validation_data=batches(), epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def stopped_and_resumed(folder, build, *, epochs=5, **at):
    """Trains with new objects, as after a restart; returns the model."""
    with pytest.raises(Preempted):
        fit(make(**build[1]), *build[0](), Stops(**at), Checkpoint(folder), epochs=epochs)
    model = make(**build[1])
    history = fit(model, *build[0](), Checkpoint(folder), epochs=epochs)
    return model, history


EMA = {"use_ema": True, "ema_momentum": 0.7}


@pytest.fixture(scope="module")
def moving():
    model, weights = make(**EMA), Weights()
    return model, weights.seen, fit(model, EvaluateAverages(), weights)


@pytest.mark.slow
def test_averages_are_validated_and_the_weights_come_back_to_the_bit(moving):
    model, seen, history = moving
    plain, weights = make(**EMA), Weights()
    unswapped = fit(plain, weights)
    for a, b in zip(weights.seen, seen, strict=True):
        assert_same(a, b)
    assert history["loss"] == unswapped["loss"] and history["val_loss"] != unswapped["val_loss"]
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(batches(), verbose=0), rel=1e-6)
    assert_same(model.get_weights(), plain.get_weights())  # at the end Keras puts the averages in place


def test_averages_by_hand(moving):
    model, seen, _ = moving
    steps, weights = make(**EMA), []
    step = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(steps.layers[-1].kernel.numpy())
    )
    fit(steps, step)
    average = weights[0]
    for weight in weights[1:]:
        average = 0.7 * average + 0.3 * weight
    np.testing.assert_allclose(model.layers[-1].kernel, average, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_during_validation_keeps_averages_out_of_training(tmp_path, moving, replicas):
    build = (lambda: [EvaluateAverages()], {**EMA, "replicas": replicas})
    model, history = stopped_and_resumed(tmp_path, build, epoch=2, in_validation=True)
    tolerance = 0 if replicas == 1 else 1e-6
    for a, b in zip(model.get_weights(), moving[0].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)
    np.testing.assert_allclose(history["val_loss"], moving[2]["val_loss"], rtol=tolerance)


def test_an_optimizer_without_averages_is_refused():
    with pytest.raises(InputError, match="SGD with use_ema=False. Create it with use_ema=True"):
        fit(make(), EvaluateAverages(), epochs=1)
