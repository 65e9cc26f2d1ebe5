"""Keras's own layers, losses and metrics that work along the batch axis are one device's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics
from keras.regularizers import OrthogonalRegularizer as Orthogonal

import tfgpu

X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
Y = np.abs(X[:, :2]) / np.abs(X[:, :2]).sum(1, keepdims=True)


def attended(x):
    x = layers.Reshape((2, 3))(x)
    return layers.Flatten()(layers.MultiHeadAttention(2, 3, attention_axes=(0,))(x, x))


def second_view(x):
    both = layers.Concatenate(axis=0)([x, layers.Rescaling(2.0)(x)])
    return keras.ops.split(layers.Dropout(0.5, seed=1)(both), 2, 0)[1]


class Centered(layers.SimpleRNNCell):
    """A cell whose state is centered over the batch."""

    def call(self, x, states, training=False):
        found, (state,) = super().call(x, states, training)
        state = state - tf.reduce_mean(state, 0)
        return state, [state]


LAYERS = {
    "softmax": layers.Softmax(axis=0),
    "softmax over all": layers.Softmax(axis=(0, 1)),
    "softmax, counted from the end": layers.Softmax(axis=-2),
    "unit norm": layers.UnitNormalization(axis=0),
    "Sequential": lambda x: keras.Sequential([layers.Dense(4), layers.Softmax(axis=0)])(x),
    "attention": attended,
    "views": second_view,
    "activation, a layer": lambda x: layers.Dense(4, activation=layers.Softmax(axis=0))(x),
    "activation, a partial": lambda x: layers.Dense(4, functools.partial(keras.activations.softmax, axis=0))(x),
    "penalty of columns": lambda x: layers.Dense(4, activity_regularizer=Orthogonal(0.1, mode="columns"))(x),
    "cells": lambda x: layers.RNN([Centered(3), Centered(2)], unroll=True)(layers.Reshape((2, 3))(x)),
}
LOSSES = {
    "cosine": lambda: losses.CosineSimilarity(axis=0),
    "cosine, counted from the end": lambda: losses.CosineSimilarity(axis=-2),
    "crossentropy": lambda: losses.CategoricalCrossentropy(axis=0),
    "focal": lambda: losses.CategoricalFocalCrossentropy(axis=0),
}
METRICS = {
    "iou": functools.partial(metrics.OneHotIoU, 8, [0, 1], axis=0),
    "mean-iou": functools.partial(metrics.OneHotMeanIoU, 8, axis=0),
    "cosine": lambda: metrics.CosineSimilarity(axis=0),
    "correlation": lambda: metrics.PearsonCorrelation(axis=0),
    "crossentropy": lambda: metrics.CategoricalCrossentropy(axis=0),
}


def model_of(layer, activation="softmax"):
    inputs = keras.Input((6,))
    hidden = inputs if layer is None else layer(inputs)
    return keras.Model(inputs, layers.Dense(2, activation)(hidden))


def fitted(strategy, layer=None, loss=lambda: "mse", metric=None, activation="softmax"):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = model_of(layer, activation)
        model.compile(keras.optimizers.SGD(0.1), loss(), metrics=[metric()] if metric else [])
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    found = [*model.get_weights(), *map(np.asarray, history.values()), model.predict(X, batch_size=8, verbose=0)]
    return np.concatenate([each.ravel() for each in found])


def looped(strategy, layer):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer = model_of(layer), keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                losses.mean_squared_error(y, model(x, training=True)), global_batch_size=8
            )
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    run = tf.function(lambda *batch: strategy.run(step, args=batch))
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(2)):
        run(*batch)
    return np.concatenate([each.ravel() for each in model.get_weights()])


def check(train, *args, **kwargs):
    found, expected = (train(tfgpu.strategy(*how), *args, **kwargs) for how in (("mirrored", 2), ("one_device",)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def some_fast(kinds, *fast):
    """The other kinds run with the slow tests."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in fast)) for kind in kinds]
    )


@some_fast(LAYERS, "softmax")
def test_layers(kind):
    check(fitted, layer=lambda x: copied(LAYERS[kind])(x))


def copied(layer):
    return layer.from_config(layer.get_config()) if isinstance(layer, layers.Layer) else layer


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_in_a_loop(kind):
    check(looped, layer=lambda x: copied(LAYERS[kind])(x))


@some_fast(LOSSES, "cosine")
def test_losses(kind):
    check(fitted, loss=LOSSES[kind])


@some_fast(METRICS, "iou", "cosine")
def test_metrics(kind):
    check(fitted, metric=METRICS[kind])


@pytest.mark.parametrize("kind", [layers.Dropout, layers.AlphaDropout])
def test_noise_of_all_rows_on_replicas_of_one_row(kind):
    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = model_of(kind(0.5, noise_shape=(1, 6), seed=3))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
        return np.concatenate([each.ravel() for each in model.get_weights()])

    check(train)


def spectra(x):
    """Rows of which one is far louder than the others."""
    loud = layers.Lambda(lambda x: x * (1 + 1e6 * tf.cast(x[:, :1] > 1.2, x.dtype)))(x)
    of_time = layers.Reshape((96,))(layers.RepeatVector(16)(loud))
    mel = layers.MelSpectrogram(num_mel_bins=4, fft_length=32, sequence_stride=16, sampling_rate=1000, top_db=20)
    return layers.Rescaling(0.01)(layers.Flatten()(mel(of_time)))


@pytest.mark.parametrize("train", [fitted, pytest.param(looped, marks=pytest.mark.slow)])
def test_a_spectrogram_is_cut_below_the_loudest_row(train):
    check(train, layer=spectra)


BROADCAST = {  # the shapes of labels and outputs
    "squares": (losses.MeanSquaredError, Y, (1, 2)),
    "huber": (losses.Huber, Y, (1, 2)),
    "metric": (metrics.MeanAbsoluteError, Y, (1, 2)),
    "classes": (losses.CategoricalGeneralizedCrossEntropy, np.arange(20)[:, None] % 5 // 3, (2,)),
    "classes-of-columns": (losses.CategoricalGeneralizedCrossEntropy, np.arange(20)[:, None] % 5 // 3, (2, 1)),
}


def labelled(strategy, labels, outputs, own):
    """Weights and logs of a model that ends in these layers, with a loss or a metric."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *outputs()])
        made = own()
        is_loss = isinstance(made, losses.Loss)
        loss = made if is_loss else lambda y, p: tf.reduce_mean(p * p)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=None if is_loss else [made])
    logs = model.fit(X, labels, batch_size=8, shuffle=False, verbose=0).history
    return np.concatenate([*[each.ravel() for each in model.get_weights()], np.ravel(list(logs.values()))])


@some_fast(BROADCAST, "squares")
def test_labels_that_are_broadcast_along_the_rows_of_outputs(kind):
    own, labels, shape = BROADCAST[kind]
    check(labelled, labels, lambda: [layers.Dense(2, "sigmoid"), layers.Reshape(shape)], own)


HINGES = {"loss": losses.Hinge, "squares": losses.SquaredHinge, "metric": metrics.Hinge}


@some_fast(HINGES, "loss")
def test_labels_of_a_hinge_are_read_from_the_whole_batch(kind):
    """Keras takes labels for -1 and 1 if one of them is neither 0 nor 1, in whatever row."""
    labels = (np.arange(20) % 2).astype("float32")
    labels[[5, 17]] = -1.0
    check(labelled, labels, lambda: [layers.Dense(1, "tanh")], HINGES[kind])


def test_a_hinge_in_a_condition_says_that_it_reads_its_own_labels(caplog):
    def loss(y_true, y_pred):
        return tf.cond(tf.size(y_pred) > 0, lambda: losses.hinge(y_true, y_pred), lambda: y_pred[:, 0])

    with tfgpu.strategy("mirrored", 2).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1, "tanh")])
        model.compile("sgd", tfgpu.by_rows(loss))
    model.fit(X, (np.arange(20) % 2).astype("float32")[:, None], batch_size=8, verbose=0)
    assert caplog.text.count("reads from its own labels whether they are 0 and 1") == 1


def test_dice_of_labels_that_are_broadcast_over_classes():
    labels = (np.arange(20) % 2).astype("float32")[:, None]
    check(labelled, labels, lambda: [layers.Dense(3, "sigmoid")], lambda: losses.Dice(axis=0))


class Above(losses.Loss):
    """Counts the rows alone whose number is above the batch's mean, by a mask of its own."""

    def call(self, y_true, y_pred):
        found = tf.reduce_sum(tf.square(y_pred[:, :1]), -1)
        found._keras_mask = found > tf.reduce_mean(found)
        return found


class Centred(Above):
    def call(self, y_true, y_pred):
        found = super().call(y_true, y_pred)
        centred = found - tf.reduce_mean(found)
        centred._keras_mask = found._keras_mask
        return centred


def test_losses_that_mask_their_rows():
    """A circle loss counts no row without a partner of its class; and a loss's own mask is that of all rows."""
    ends = [lambda: layers.Dense(4), layers.UnitNormalization]
    for own in (lambda: losses.Circle(gamma=4), Above, Centred):
        check(labelled, (np.arange(20) * 7 % 6).astype("int32"), lambda: [each() for each in ends], own)


def test_logits_of_another_activation_are_one_device_s():
    """Keras takes the logits of any activation in any of its cross-entropies."""
    check(fitted, loss=lambda: losses.CategoricalCrossentropy(axis=0), activation="sigmoid")
