"""A training in tasks under a parameter server: FOLDER HOW STALENESS [STOP].

HOW: `tasks` (growing, distilling, elastic weights, replay), `stream` (`fit_stream`). STALENESS: `none` or a number.
STOP: the chief dies after so many epochs of the second task, of which it has checkpoints.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Tasks
from tfgpu.training import incremental

folder, how, staleness = sys.argv[1:4]
stop = int(sys.argv[4]) if len(sys.argv) > 4 else None
TASKS, ROWS, EPOCHS = 3, 60, 3
draw = np.random.default_rng(0)
Y = np.repeat(np.arange(TASKS * 2), ROWS // 2)
X = draw.normal(size=(TASKS * ROWS, 6)).astype("float32")
X[:, :6] += 3 * np.eye(6, dtype="float32")[Y]
order = np.concatenate([task * ROWS + draw.permutation(ROWS) for task in range(TASKS)])
X, Y = X[order], Y[order]
now = 0


@keras.saving.register_keras_serializable("tests")
class Rows(keras.metrics.Metric):
    """Counts the rows and sums their labels: no row may be lost or repeated."""

    def __init__(self, name="rows", **how):
        super().__init__(name=name, **how)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32) + 100.0))

    def result(self):
        return self.total


class Dies(keras.callbacks.Callback):
    has_memory = False

    def on_epoch_end(self, epoch, logs=None):
        if stop is not None and now == 1 and epoch + 1 == stop:
            os._exit(7)


def model_of(classes):
    layers = [keras.layers.Dense(16, "relu", name="first"), keras.layers.Dense(classes, name="head")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    compiled(model)
    return model


def compiled(model, optimizer=None):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.02), loss, metrics=[Rows()])


def in_tasks(model):
    global now
    replay, elastic = incremental.Replay(24, balance=True, seed=1), incremental.ElasticWeights(1.0)
    tasks = Tasks(folder, remember={"replay": replay, "elastic": elastic})
    for task in range(1, tasks.done):
        model = incremental.grow(model, 2 * task + 2)
    for now in range(tasks.begin(model), TASKS):
        rows = slice(now * ROWS, (now + 1) * ROWS)
        trained = model
        if now:
            old, model = model, incremental.grow(model, 2 * now + 2)
            elastic.attach(model)
            with model.distribute_strategy.scope():
                trained = incremental.Distilled(model, old, weight=0.5)
                compiled(trained, model.optimizer)
        data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).shuffle(ROWS, seed=now).batch(7)
        history = trained.fit(replay.mix(data, 0.4), epochs=EPOCHS, callbacks=[tasks.checkpoint(), Dies()], verbose=0)
        replay.add(X[rows], Y[rows])
        elastic.add(model, X[rows], Y[rows], examples=10)
        tasks.end(model, history.history)
    return model, replay, tasks.logs


def stream(model):
    def batches():
        global now
        for begin in range(0, len(X), 20):
            now = begin // ROWS
            yield X[begin : begin + 20], Y[begin : begin + 20]

    replay = incremental.Replay(24, balance=True, seed=1)
    tasks = Tasks(folder, remember={"replay": replay})
    settings = {"window": ROWS, "global_batch": 7, "epochs": EPOCHS, "verbose": 0, "replay": replay, "share": 0.4}
    logs = incremental.fit_stream(model, batches(), callbacks=Dies(), tasks=tasks, **settings)
    return model, replay, logs


def main(strategy):
    """Trains and prints the results."""
    tfgpu.repair_keras()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = model_of({"tasks": 2}.get(how, TASKS * 2))
    trained, kept, logs = {"tasks": in_tasks, "stream": stream}[how](made)
    right = trained.predict(X, verbose=0).argmax(1) == Y
    return {
        "weights": [weight.tolist() for weight in trained.get_weights()],
        "updates": int(trained.optimizer.iterations.numpy()),
        "logs": logs,
        "right": float(right.mean()),
        "last": float(right[-ROWS:].mean()),
        "seen": int(kept.seen),
        "kept": [part.tolist() for part in kept.arrays],
    }


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        bound = None if staleness == "none" else int(staleness)
        strategy = tfgpu.strategy("parameter_server", max_staleness=bound)
    else:
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    print(json.dumps(main(strategy)))
