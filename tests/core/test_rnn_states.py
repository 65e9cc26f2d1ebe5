"""A stateful RNN's states, one for each row of the batch, on replicas: one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfgpu

ROWS, BATCH = 16, 4
SHAPES = {"conv": (5, 3, 3, 1)}
KINDS = {
    "simple": lambda: [layers.SimpleRNN(2, stateful=True)],
    "stacked": lambda: [layers.LSTM(2, stateful=True, return_sequences=True), layers.GRU(2, stateful=True)],
    "cells": lambda: [layers.RNN([layers.GRUCell(2), layers.LSTMCell(2)], stateful=True)],
    "bidirectional": lambda: [layers.Bidirectional(layers.LSTM(2, stateful=True, dropout=0.2))],
    "conv": lambda: [layers.ConvLSTM2D(2, 2, stateful=True), layers.Flatten()],
}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "simple"]


class Reset(keras.callbacks.Callback):
    """Begins each epoch with states of zero."""

    def on_epoch_begin(self, epoch, logs=None):
        for layer in self.model.layers:
            getattr(layer, "reset_state", lambda: None)()


def trained(kind: str, replicas: int) -> dict:
    keras.utils.set_random_seed(0)
    shape = SHAPES.get(kind, (5, 3))
    data = np.random.default_rng(0)
    x, y = data.random((ROWS, *shape), "float32"), data.random((ROWS, 1), "float32")
    with tfgpu.strategy(devices=[f"CPU:{number}" for number in range(replicas)]).scope():
        model = keras.Sequential([keras.Input(batch_shape=(BATCH, *shape)), *KINDS[kind](), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [] if kind == "cells" else [Reset()]  # Keras cannot reset states within states
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return {"variables": [v.numpy() for v in model.variables], "logs": [*history.history["loss"], evaluated, predicted]}


@pytest.mark.parametrize(
    ("kind", "replicas"), [("simple", 3), *[pytest.param(k.values[0], 2, marks=k.marks) for k in SLOW]]
)
def test_replicas_continue_the_states_of_their_rows(kind, replicas):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trained(kind, replicas), trained(kind, 1)
    )


@pytest.mark.slow
def test_a_loop_by_hand_trains_it_too():
    def step(model, x):
        def of_rows(rows):
            return keras.ops.sum(model(rows))

        return tf.function(lambda rows: strategy.reduce("SUM", strategy.run(of_rows, (rows,)), axis=None))(x)

    found, x = [], tf.random.stateless_uniform((BATCH, 5, 3), (0, 1))
    for replicas in (1, 2):
        keras.utils.set_random_seed(0)
        strategy = tfgpu.strategy(devices=[f"CPU:{number}" for number in range(replicas)])
        with strategy.scope():
            model = keras.Sequential([keras.Input(batch_shape=(BATCH, 5, 3)), layers.SimpleRNN(2, stateful=True)])
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(x).repeat(2))
        found.append([float(step(model, rows)) for rows in data] + [model.layers[0].states[0].numpy()])
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *found)


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loop_by_hand_is_tried_and_counts_one_number_once(replicas, caplog):
    """A trial has other rows than the layer has states; one of three replicas has no rows of a batch of two."""

    def counted(replicas: int) -> list[float]:
        keras.utils.set_random_seed(0)
        strategy = tfgpu.strategy(devices=[f"CPU:{number}" for number in range(replicas)])
        with strategy.scope():
            model = keras.Sequential([keras.Input(batch_shape=(2, 5, 3)), layers.SimpleRNN(2, stateful=True)])
            of_loss, of_outputs = keras.metrics.Mean(), keras.metrics.Mean()
        mse = keras.losses.MeanSquaredError()

        def step(rows):
            outputs = model(rows)
            of_loss.update_state(mse(rows[:, 0, :2], outputs))
            of_outputs.update_state(tf.reduce_mean(outputs**2))

        run = tf.function(lambda rows: strategy.run(step, (rows,)))
        x = tf.random.stateless_uniform((6, 5, 3), (0, 1))
        for rows in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(2)):
            run(rows)
        return [float(metric.result()) for metric in (of_loss, of_outputs)]

    np.testing.assert_allclose(counted(replicas), counted(1), atol=1e-6)
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("tfgpu")]


@pytest.mark.slow
def test_a_batch_of_other_rows_than_the_states_is_named():
    with tfgpu.strategy(devices=["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input(batch_shape=(BATCH, 5, 3)), layers.SimpleRNN(1, stateful=True)])
        model.compile("sgd", "mse")
    x = np.zeros((BATCH + 2, 5, 3), "float32")
    with pytest.raises(Exception, match="has states for batches of 4 rows"):
        model.fit(x, x[:, 0, :1], batch_size=BATCH, verbose=0)
