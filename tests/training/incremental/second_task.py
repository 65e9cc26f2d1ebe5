"""Incremental training on two tasks with all methods or one of them, under any strategy, for comparisons."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.training import incremental

METHODS = ("distilled", "elastic", "replay", "rates", "frozen")
_draw = np.random.default_rng(0)
X, Y = _draw.normal(size=(90, 6)).astype("float32"), _draw.integers(0, 3, 90)
NEW_X, NEW_Y = _draw.normal(size=(41, 6)).astype("float32"), _draw.integers(2, 5, 41)
WEIGHTS = _draw.uniform(0.2, 2.0, 41).astype("float32")


def first_model(optimizer, policy=None, layers="all"):
    keras.utils.set_random_seed(1)
    with contextlib.ExitStack() as stack:
        if policy:
            before = keras.config.dtype_policy()
            keras.config.set_dtype_policy(policy)
            stack.callback(keras.config.set_dtype_policy, before)
        stack_of = [
            keras.layers.Dense(8, "relu", name="first", kernel_regularizer=keras.regularizers.L2(1e-3)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, "tanh", name="second"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, name="head", dtype="float32"),
        ]
        if layers == "plain":  # nothing that mixes rows or draws
            stack_of = [layer for layer in stack_of if isinstance(layer, keras.layers.Dense)]
        model = keras.Sequential([keras.Input((6,)), *stack_of])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def train(
    strategy, methods=METHODS, *, optimizer=None, policy=None, weighted=True, epochs=4, batch=8, first=2, layers="all"
):
    """Trains on a first task, measures, grows, and trains on the second; returns the second one's weights and logs."""
    tfgpu.repair_keras()
    make = optimizer or (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5))
    with strategy.scope():
        old = first_model(make(), policy, layers)
    keras.utils.set_random_seed(2)
    if first:
        old.fit(X, Y, batch_size=30, epochs=first, shuffle=False, verbose=0)
    return second(old, methods, weighted=weighted, epochs=epochs, batch=batch)


def second(old, methods, *, weighted=True, epochs=4, batch=8):
    """Trains on the second task."""
    keras.utils.set_random_seed(3)
    model = incremental.grow(old, 5)
    if "elastic" in methods:
        incremental.ElasticWeights(5.0).add(old, X, Y, examples=20).attach(model)
    if "frozen" in methods:
        incremental.freeze(model, "first")
    loss, optimizer = old.loss, model.optimizer
    if "rates" in methods:
        optimizer = incremental.discriminative(optimizer, model, {"sec*": 0.3, "head": 2.0})
    trained = model
    with old.distribute_strategy.scope():
        if "distilled" in methods:
            trained = incremental.Distilled(model, old, weight=0.7)
        trained.compile(optimizer, loss, weighted_metrics=["accuracy"])
    rows = (NEW_X, NEW_Y, WEIGHTS) if weighted else (NEW_X, NEW_Y)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(batch)
    if "replay" in methods:
        kept = (X, Y, np.ones(90, "float32")) if weighted else (X, Y)
        data = incremental.Replay(25, balance=True).add(*kept).mix(data, 0.4)
    keras.utils.set_random_seed(4)
    history = trained.fit(data, epochs=epochs, verbose=0, shuffle=False)
    return model.get_weights(), history.history


def difference(one, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
