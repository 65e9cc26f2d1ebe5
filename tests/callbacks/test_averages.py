"""Averages of weights: hand-computed, on replicas, and after a resume."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint, EvaluateAverages, StochasticWeightAverage
from tfgpu.errors import InputError, Preempted
from tfgpu.optim import batch_norm_statistics

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, size=(22, 4)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
BATCHES = (X[:8], X[8:16], X[16:])  # the last one of 6 rows


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def make(replicas=1, batch_norm="global", **optimizer):
    names = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored" if replicas > 1 else "one_device", devices=names, batch_norm=batch_norm)
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


@pytest.fixture(scope="module")
def averaged():
    """A training with the mean of epochs 2 and 4 (from 0), on one device and on two replicas."""
    found = {}
    for replicas in (1, 2):
        model, weights = make(replicas), Weights()
        mean = StochasticWeightAverage(2, every=2, data=batches())
        found[replicas] = (model, weights.seen, fit(model, weights, mean), mean.averaged)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_run_ends_with_the_mean_of_its_last_epochs(averaged, replicas):
    model, seen, history, count = averaged[replicas]
    assert count == 2 and len(history["val_loss"]) == 5
    for two, four, variable in zip(seen[2], seen[4], model.trainable_variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), (two + four) / 2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_running_statistics_are_the_averages_over_the_batches_by_hand(averaged, replicas):
    first, dense, second, _ = averaged[replicas][0].layers
    np.testing.assert_allclose(first.moving_mean, X.mean(0), atol=1e-5)
    np.testing.assert_allclose(first.moving_variance, sum(len(b) * b.var(0) for b in BATCHES) / 22, rtol=1e-5)
    mean, variance = 0.0, 0.0
    for b in BATCHES:
        x = (b - b.mean(0)) / np.sqrt(b.var(0) + first.epsilon) * first.gamma.numpy() + first.beta.numpy()
        x = x @ dense.kernel.numpy() + dense.bias.numpy()
        mean, variance = mean + len(b) / 22 * x.mean(0), variance + len(b) / 22 * x.var(0)
    np.testing.assert_allclose(second.moving_mean, mean, atol=1e-5)
    np.testing.assert_allclose(second.moving_variance, variance, rtol=1e-4)


@pytest.mark.slow
def test_two_replicas_end_as_one_device(averaged):
    for a, b in zip(averaged[1][0].get_weights(), averaged[2][0].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
def test_training_itself_is_unchanged(averaged):
    model, weights = make(), Weights()
    assert fit(model, weights) == averaged[1][2]
    for a, b in zip(weights.seen, averaged[1][1], strict=True):
        assert_same(a, b)
    assert model.layers[0].momentum == 0.99 == averaged[1][0].layers[0].momentum


def test_moments_by_replicas_are_recomputed_over_the_whole_batch():
    one, ours = make(), make(2, batch_norm="replica")
    for model in (one, ours):
        batch_norm_statistics.recompute(model, batches())
    for a, b in zip(one.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert not ours.layers[0].synchronized and ours.layers[0].momentum == 0.99


def test_a_frozen_layer_keeps_its_statistics():
    model = make()
    model.layers[0].trainable = False
    assert batch_norm_statistics.layers_of(model) == [model.layers[2]]


def test_batch_normalization_needs_the_data():
    with pytest.raises(InputError, match="new running statistics in .*Give StochasticWeightAverage the training data"):
        fit(make(), StochasticWeightAverage(1), epochs=1)


def test_a_training_that_ends_too_early_warns(caplog):
    fit(make(), StochasticWeightAverage(3, data=batches()), epochs=1)
    assert "The training ended before epoch 4: no weights were averaged." in caplog.text


@pytest.mark.parametrize(("start", "every"), [(-1, 1), (True, 1), (0, 0), (1.5, 1)])
def test_numbers_out_of_range_are_refused(start, every):
    with pytest.raises(InputError, match="must be a whole number from"):
        StochasticWeightAverage(start, every=every)


def stopped_and_resumed(folder, build, *, epochs=5, **at):
    """Trains with new objects, as after a restart; returns the model."""
    with pytest.raises(Preempted):
        fit(make(**build[1]), *build[0](), Stops(**at), Checkpoint(folder), epochs=epochs)
    model = make(**build[1])
    history = fit(model, *build[0](), Checkpoint(folder), epochs=epochs)
    return model, history


@pytest.mark.slow
def test_a_mean_survives_a_stop_between_its_epochs(tmp_path, averaged):
    build = (lambda: [StochasticWeightAverage(2, every=2, data=batches())], {})
    model, history = stopped_and_resumed(tmp_path, build, epoch=3)
    assert_same(model.get_weights(), averaged[1][0].get_weights())
    assert history == averaged[1][2]


@pytest.mark.slow
def test_a_run_that_is_over_ends_with_its_mean_again(tmp_path, averaged):
    build = [StochasticWeightAverage(2, every=2, data=batches())]
    fit(make(), *build, Checkpoint(tmp_path))
    model = make()
    fit(model, StochasticWeightAverage(2, every=2, data=batches()), Checkpoint(tmp_path))
    assert_same(model.get_weights(), averaged[1][0].get_weights())


EMA = {"use_ema": True, "ema_momentum": 0.7}


@pytest.fixture(scope="module")
def moving():
    model, weights = make(**EMA), Weights()
    return model, weights.seen, fit(model, EvaluateAverages(), weights)


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
