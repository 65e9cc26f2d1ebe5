"""Trials of steps of the user's own: where replicas hold pieces of the weights, and within a scope."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.core.row_mixing import verdicts
from tfgpu.core.row_mixing.trials import draws, step_trial
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(11, 3)).astype("float32")
TWO = ["CPU:0", "CPU:1"]


class ByTape(keras.Model):
    """Takes gradients by a tape, of a loss that is a mean over rows."""

    def loss_of(self, y, outputs):
        return ops.mean(ops.square(y - outputs))

    def changed(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True)) + sum(self.losses)
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ByNumber(ByTape):
    """What it does with a gradient is the same for a piece of it, and no sum over rows: the sum comes first."""

    def changed(self, gradients):
        return [ops.clip(gradient, -0.01, 0.01) for gradient in gradients]


class ByNorm(ByTape):
    def changed(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [gradient / tf.maximum(norm, 0.1) for gradient in gradients]


class ByBound(ByTape):
    """Clips where the norm is larger than that of any drawn rows' gradients."""

    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 100.0)[0]


class Skips(ByTape):
    """Leaves out an update where the norm is larger than that of any drawn rows' gradients."""

    def changed(self, gradients):
        is_small = tf.cast(tf.linalg.global_norm(gradients) < 100.0, "float32")
        return [gradient * is_small for gradient in gradients]


class Floors(ByTape):
    """Makes gradients longer where the norm is smaller than that of any drawn rows' gradients."""

    def changed(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [each * tf.maximum(1.0, 1e-2 / norm) for each in gradients]


class RateByLoss(ByTape):
    """The optimizer's update reads what the step has assigned just before."""

    def loss_of(self, y, outputs):
        loss = super().loss_of(y, outputs)
        self.optimizer.learning_rate.assign(0.1 * loss)
        return loss


class RateByFirst(ByTape):
    """Its first part has the whole's first row."""

    def loss_of(self, y, outputs):
        self.optimizer.learning_rate.assign(0.1 * ops.abs(y[0, 0]))
        return super().loss_of(y, outputs)


class RateByFirstInCondition(ByTape):
    def loss_of(self, y, outputs):
        rate = 0.1 * ops.abs(y[0, 0])
        tf.cond(rate < 9, lambda: ops.convert_to_tensor(self.optimizer.learning_rate.assign(rate)), lambda: 0.0)
        return super().loss_of(y, outputs)


class KeepsFirst(ByTape):
    """Assigns to a variable that replicas average."""

    def loss_of(self, y, outputs):
        if not hasattr(self, "first"):
            self.first = keras.Variable(0.0, aggregation="mean", trainable=False)
        self.first.assign(y[0, 0])
        return super().loss_of(y, outputs)


class RateByCount(ByTape):
    def changed(self, gradients):
        self.optimizer.learning_rate.assign(0.5 / (1 + tf.cast(self.optimizer.iterations.value, "float32")))
        return gradients


class Decays(ByTape):
    """Adds something of its own to the gradients: by rows."""

    def changed(self, gradients):
        return [gradient + 0.01 * each for gradient, each in zip(gradients, self.trainable_variables, strict=True)]


class ByKernel(ByTape):
    """What it does depends on the shape that a weight has on one device."""

    def changed(self, gradients):
        ranks = [len(variable.shape) for variable in self.trainable_variables]
        return [gradient * (0.5 if rank > 1 else 1.0) for gradient, rank in zip(gradients, ranks, strict=True)]


class Divides(ByTape):
    def loss_of(self, y, outputs):
        chosen = ops.cast(y > 0, "float32")
        return ops.sum(ops.square(y - outputs) * chosen) / (1.0 + ops.sum(chosen))


class Logs(ByTape):
    def train_step(self, data):
        return {**super().train_step(data), "size": ops.sum(ops.square(self.trainable_variables[0]))}


class Reads(ByTape):
    """Cannot be tried."""

    def loss_of(self, y, outputs):
        return super().loss_of(y, outputs) + (float("nan") if tf.executing_eagerly() else 0.0)


def made(kind, strategy, stage=None):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((5,))
        x = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        model = kind(inputs, keras.layers.Dense(3)(x))
    if stage:
        model = tfgpu.parallel.shard(model, stage=stage)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9))
    return model


def fitted(model):
    logs = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), np.array(logs["loss"])]


def two_devices(**how):
    return tfgpu.strategy("mirrored", devices=TWO, **how)


def verdict_of(strategy):
    (step,) = [piece for piece in verdicts.of(strategy) if piece.name.startswith("step")]
    return step.verdict


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByNumber, ByTape])
def test_a_step_by_rows_on_pieces_of_the_weights(kind, caplog):
    alone, strategy = fitted(made(kind, tfgpu.strategy("one_device", devices=TWO[:1]))), two_devices()
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        spread = fitted(made(kind, strategy, stage=3))
    for one, other in zip(alone, spread, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert verdict_of(strategy) == verdicts.BY_ROWS and kind.__name__ not in caplog.text


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (ByBound, verdicts.ON_ALL_ROWS),
        pytest.param(Floors, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        pytest.param(Skips, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        (RateByLoss, verdicts.ON_ALL_ROWS),
        pytest.param(RateByFirst, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        pytest.param(RateByFirstInCondition, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        pytest.param(KeepsFirst, verdicts.ON_ALL_ROWS, marks=pytest.mark.slow),
        pytest.param(RateByCount, verdicts.BY_ROWS, marks=pytest.mark.slow),
        (Decays, verdicts.BY_ROWS),
    ],
)
def test_what_an_update_would_do(kind, verdict, caplog):
    """Gradients may be large or small, and the rate may be assigned."""
    strategy = two_devices()
    fitted(made(kind, strategy))
    assert verdict_of(strategy) == verdict and "could not be tried" not in caplog.text


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Divides, "the gradients would differ"),
        (ByNorm, "what it does with the gradients of a piece of the weights would differ"),
        (ByBound, "what it does with the gradients of a piece of the weights would differ"),
        (Skips, "what it does with the gradients of a piece of the weights would differ"),
        (ByKernel, "what it does with the gradients of a piece of the weights would differ"),
        (Logs, "a number in the logs, of a piece of the weights or gradients, would differ"),
        (Reads, "it could not be tried"),
    ],
)
def test_a_step_that_is_not_by_rows_is_refused_on_pieces_of_the_weights(kind, why):
    strategy = two_devices()
    model = made(kind, strategy, stage=3)
    before = model.get_weights()
    with pytest.raises(InputError, match=rf"{kind.__name__}.train_step.*{why}.*stage=2.*by_rows"):
        fitted(model)
    assert verdict_of(strategy) == verdicts.REFUSED
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_what_cannot_be_tried_runs_on_pieces_of_the_weights_where_that_is_asked_for(caplog):
    strategy = two_devices(unproven="warn")
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        fitted(made(Reads, strategy, stage=3))
    assert verdict_of(strategy) == verdicts.BY_ROWS and "It runs on each replica's rows" in caplog.text


class Rare(ByTape):
    """Compares rows where a number is large, as none of those that are drawn is."""

    def loss_of(self, y, outputs):
        rare = ops.cast(y > 50, "float32")
        return super().loss_of(y, outputs) / (1.0 + ops.sum(rare)) ** 2


def test_the_user_s_own_rows_are_tried(caplog):
    strategy, labels = two_devices(), np.where(Y > 0, Y + 100, Y)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        made(Rare, strategy).fit(X.astype("float64"), labels, batch_size=8, verbose=0)
    assert verdict_of(strategy) == verdicts.ON_ALL_ROWS


@pytest.mark.parametrize(
    ("arguments", "is_given"),
    [
        ({"x": X, "y": Y}, True),
        ({"x": tf.constant(X), "y": Y.astype("float64")}, True),
        ({"x": X, "y": Y, "sample_weight": Y[:, 0]}, False),  # not what the step gets
        ({"x": X[:6], "y": Y[:6]}, False),
        ({"x": X, "y": Y.astype(str)}, False),
        ({"x": tf.data.Dataset.from_tensors((X, Y))}, False),
        ({}, False),
    ],
)
def test_which_data_give_rows_to_try(arguments, is_given):
    spec = tf.TensorSpec((None, 5)), tf.TensorSpec((8, 3))
    found = draws.given_rows(arguments, spec, 7)
    assert (found is not None) == is_given
    for given, own, each in zip(found or (), (X, Y), spec, strict=False):
        np.testing.assert_array_equal(given, own[:7])
        assert given.dtype == each.dtype


@pytest.mark.slow
def test_within_a_scope(caplog):
    strategy = two_devices()
    with strategy.scope(), caplog.at_level(logging.WARNING, logger="tfgpu"):
        made(ByTape, strategy).fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert verdict_of(strategy) == verdicts.BY_ROWS and "ByTape" not in caplog.text


class Marked(keras.Model):
    @tfgpu.by_rows
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


@pytest.mark.parametrize(("kind", "is_own"), [(keras.Model, False), (Marked, True)])
def test_a_method_that_runs_on_devices_of_its_own_is_still_whose_it_is(kind, is_own):
    """`apply` runs `compute_loss` where the last layer is; Keras's needs no trial, and a mark on the user's counts."""
    inputs = keras.Input((5,))
    model = kind(inputs, keras.layers.Dense(3)(inputs))
    model = tfgpu.parallel.apply(model, tfgpu.parallel.Mesh(data=2, devices=TWO), zero=3)
    model.compile("sgd", "mse")
    assert step_trial.has_own_step(model, "train") == is_own
    if is_own:
        model.fit(X, X[:, :3], batch_size=8, verbose=0)
        assert verdict_of(model.distribute_strategy) == verdicts.BY_ROWS
