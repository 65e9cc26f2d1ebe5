"""Layers, metrics and losses that mix rows only where numbers are large, small or positive, or in later steps."""

import contextlib

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.core.row_mixing.trials.isolation import TrialShard
from tfgpu.core.row_mixing.trials.layer_calls import Needs
from tfgpu.core.row_mixing.trials.layer_trial import LayerTrial
from tfgpu.core.row_mixing.trials.loss_trial import LossTrial
from tfgpu.core.row_mixing.trials.loss_trial import Needs as LossNeeds
from tfgpu.core.row_mixing.trials.metric_trial import MetricTrial

X = tf.zeros((7, 5))


@contextlib.contextmanager
def replica():
    """In the block this is a replica that holds seven rows."""
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with tf.distribute.ReplicaContext(strategy, 0), TrialShard(0, 7, 7).held():
        yield


def tried(layer: keras.layers.Layer, args: tuple, kwargs: dict):
    return LayerTrial(layer, args, kwargs, tried).run()


def needs(layer: keras.layers.Layer, x=X) -> Needs:
    layer(x)
    with replica():
        return tried(layer, (x,), {}).needs


def of(function) -> keras.layers.Layer:
    class Own(layers.Layer):
        def call(self, x):
            return function(x)

    return Own()


def by_norm(x):
    return x * tf.minimum(1.0, 300.0 / tf.norm(x))


def above(bound):
    return lambda x: tf.cond(tf.reduce_max(x) > bound, lambda: x / 2.0, lambda: x)


def below(bound):
    return lambda x: tf.where(tf.reduce_max(tf.abs(x)) < bound, x / 2.0, x)


def if_positive(x):
    return tf.where(tf.reduce_sum(x) > 0, x + 1.0, x)


def if_all_small(x):
    return tf.cond(tf.reduce_min(tf.abs(x)) > 0.01, lambda: x - 1.0, lambda: x)


def gradient_if_large(x):
    @tf.custom_gradient
    def own(x):
        return tf.identity(x), lambda up: tf.cond(tf.reduce_max(x) > 70.0, lambda: 2.0 * up, lambda: up)

    return own(x)


class Penalty(layers.Layer):
    def call(self, x):
        squares = ops.mean(ops.square(x))
        self.add_loss(tf.where(tf.reduce_max(tf.abs(x)) > 60.0, squares, 0.0))
        return x


class Alarm(layers.Layer):
    """Counts batches with an outlier."""

    def build(self, shape):
        self.alarms = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.alarms.assign(self.alarms + tf.where(tf.reduce_max(x) > 40.0, 1.0, 0.0))
        return x


class Late(layers.Layer):
    """Centers rows after many steps."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.steps.assign_add(1)
        return tf.where(self.steps > 50, x - tf.reduce_mean(x, 0), x)


class Switched(layers.Layer):
    """Centers rows where a callback has raised a number, which is no counter."""

    def build(self, shape):
        self.level = self.add_weight(shape=(), initializer=lambda *how, **more: 2.0, trainable=False)

    def call(self, x):
        return tf.cond(self.level > 3.0, lambda: x - tf.reduce_mean(x, 0), lambda: x)


class Within(layers.Layer):
    """Has a layer that clips, and one by rows."""

    def __init__(self):
        super().__init__()
        self.first, self.own = layers.Dense(4), of(by_norm)

    def call(self, x):
        return self.own(self.first(x))


@pytest.mark.parametrize(
    "layer",
    [
        *map(of, [by_norm, above(10.0), above(500.0), below(0.05), if_positive, if_all_small, gradient_if_large]),
        Penalty(),
        Alarm(),
        Late(),
        Switched(),
    ],
)
def test_layers_that_mix_rows_where_numbers_have_some_size(layer):
    assert needs(layer) is Needs.ALL


def test_whole_numbers_are_also_tried_large():
    assert needs(of(lambda x: tf.where(tf.reduce_max(x) > 100, x - 1, x)), tf.zeros((7, 5), tf.int32)) is Needs.ALL
    assert needs(layers.Lambda(lambda x: tf.gather(tf.ones((9, 2)), x)), tf.zeros((7, 5), tf.int32)) is Needs.ITS_ROWS


def attend(x):
    return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.clip_by_norm(x, 20.0, -1),
        lambda x: tf.sin(100.0 * tf.matmul(x, tf.ones((5, 64)) / 7.0)),
        lambda x: tf.nn.softmax(tf.matmul(x, 3.0 * tf.ones((5, 64)))),
        lambda x: tf.where(tf.reduce_max(x, -1, keepdims=True) > 10.0, x / 2.0, x),
        lambda x: attend(tf.reshape(x, (-1, 5, 1)) * tf.ones((1, 1, 6))),
        lambda x: tf.exp(x) / (1.0 + tf.exp(x)),
    ],
    ids=["clip", "sine", "softmax", "where", "attention", "exponential"],
)
def test_layers_by_rows_stay_so(function):
    assert needs(of(function)) is Needs.ITS_ROWS


def test_a_layer_within_is_named():
    assert needs(Within()) is Needs.ITS_PARTS


class Bounded(keras.metrics.Metric):
    """A sum of what `of` gives."""

    def __init__(self, of):
        super().__init__()
        self.total, self.of = self.add_variable((), "zeros"), of

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(self.of(y_pred)))

    def result(self):
        return self.total + 0.0


@pytest.mark.parametrize(
    ("function", "all_rows"),
    [
        (lambda p: tf.where(tf.reduce_max(p) > 50.0, p / 2.0, p), True),
        (lambda p: tf.minimum(tf.reduce_sum(p), 90.0), True),
        (lambda p: tf.cond(tf.reduce_max(p) > 50.0, lambda: 1.0, lambda: 0.0), True),
        (lambda p: tf.where(p > 50.0, 50.0 + p / 2.0, tf.square(p)), False),
    ],
)
def test_metrics_whose_updates_have_a_bound(function, all_rows):
    metric = Bounded(function)
    with replica():
        assert MetricTrial(Bounded.update_state, metric, (X, X), {}).run().all_rows is all_rows


def errors(y, p):
    return tf.reduce_mean(tf.abs(y - p), -1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, p: tf.minimum(tf.reduce_mean(errors(y, p)), 50.0), LossNeeds.ALL),
        (lambda y, p: tf.where(tf.reduce_max(p) > 30.0, errors(y, p), errors(y, p) ** 2), LossNeeds.ALL_GIVES_ROWS),
        (lambda y, p: tf.reduce_mean(tf.where(tf.reduce_max(y) > 30.0, errors(y, p), 0.0)), LossNeeds.ALL),
        (lambda y, p: tf.reduce_mean(tf.minimum(errors(y, p), 50.0)), LossNeeds.ITS_MEAN),
        (lambda y, p: tf.reduce_mean(tf.sin(100.0 * p)) + tf.reduce_mean(y), LossNeeds.ITS_MEAN),
        (keras.losses.huber, LossNeeds.ITS_ROWS),
    ],
)
def test_losses_with_a_bound(function, expected):
    assert LossTrial(function, (tf.zeros((4, 2)), tf.zeros((4, 2))), function).run() is expected
