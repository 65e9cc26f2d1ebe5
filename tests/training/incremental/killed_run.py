"""A training in tasks that can be killed anywhere: FOLDER HOW REPLICAS [WHERE], the weights go to FOLDER.npz.

REPLICAS: how many of one process, or `workers`, of which the one that WHERE names last dies, once.

HOW: `tasks` (everything at once: growing, distilling, elastic weights, replay, frozen layers, warm-ups), `online` (a
memory that fills within `fit`), `stream`. WHERE: `SIGNAL:task:moment`; a moment is `step-N` (of the task),
`before-end`, `in-end`, or `in-add`; `:worker` follows where there are several.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint, Tasks
from tfgpu.checkpoint import storage
from tfgpu.training import incremental

folder, how, replicas = sys.argv[1:4]
kind, at, when, *who = sys.argv[4].split(":") if len(sys.argv) > 4 else (None, None, None)
if who and (who != [str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])] or os.path.exists(folder + ".died")):
    kind = None
now = 0
draw = np.random.default_rng(0)
X = draw.normal(size=(3 * 60, 6)).astype("float32")
Y = np.repeat(np.arange(6), 30)
X[:, 0] += Y


def dies(moment):
    if kind and int(at) == now and when == moment:
        open(folder + ".died", "w").close()
        os.kill(os.getpid(), getattr(signal, kind))


class Dies(keras.callbacks.Callback):
    every_batch = True
    has_memory = False

    def on_train_begin(self, logs=None):
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        dies(f"step-{self.steps}")


class Fills(keras.callbacks.Callback):
    """Adds some of the rows to the memory during training."""

    def __init__(self, replay, rows):
        super().__init__()
        self.replay, self.rows = replay, rows

    def on_epoch_end(self, epoch, logs=None):
        self.replay.add(X[self.rows][epoch * 5 : epoch * 5 + 5], Y[self.rows][epoch * 5 : epoch * 5 + 5])


def model_of(classes):
    layers = [
        keras.layers.Dense(8, "relu", name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(8, "relu", name="second"),
        keras.layers.Dropout(0.2, name="drop"),
        keras.layers.Dense(classes, name="head"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def in_tasks(model):
    global now
    replay, elastic = incremental.Replay(24, balance=True, seed=1), incremental.ElasticWeights(5.0)
    tasks = Tasks(folder, remember={"replay": replay, "elastic": elastic})
    for task in range(1, tasks.done):
        model = incremental.grow(model, 2 * task + 2)
    for now in range(tasks.begin(model), 3):
        rows = slice(now * 60, now * 60 + 60)
        trained = model
        if now:
            old, model = model, incremental.grow(model, 2 * now + 2)
            elastic.attach(model)
            incremental.freeze(model, "first")  # stays so in the tasks that follow
            if now == 1:
                incremental.rewarm(model, steps=30)  # longer than the task
            with model.distribute_strategy.scope():
                trained = incremental.Distilled(model, old, weight=0.5)
                trained.compile(model.optimizer, model.loss)
        data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).shuffle(60, seed=now).batch(10)
        trained.fit(replay.mix(data), epochs=3, callbacks=[tasks.checkpoint(every_steps=4), Dies()], verbose=0)
        replay.add(X[rows], Y[rows])
        dies("in-add")
        elastic.add(model, X[rows], Y[rows], examples=10)
        dies("before-end")
        if kind and when == "in-end" and int(at) == now:
            storage.atomic._flush_all = lambda path: dies("in-end")  # written, and not yet renamed
        tasks.end(model)
    return model, replay


def online(model):
    global now
    replay = incremental.Replay(24, balance=True, seed=1)
    for now in range(3):
        rows = slice(now * 60, now * 60 + 60)
        data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).shuffle(60, seed=now).batch(10)
        checkpoint = Checkpoint(f"{folder}/{now}", remember={"replay": replay}, every_steps=4)
        calls = [checkpoint, Fills(replay, rows), Dies()]
        model.fit(replay.mix(data), epochs=3, callbacks=calls, verbose=0)
    return model, replay


def stream(model):
    def batches():
        global now
        for begin in range(0, len(X), 20):
            now = begin // 60
            yield X[begin : begin + 20], Y[begin : begin + 20]

    replay = incremental.Replay(24, balance=True, seed=1)
    tasks = Tasks(folder, remember={"replay": replay})
    settings = {"window": 60, "global_batch": 10, "epochs": 2, "verbose": 0, "replay": replay, "tasks": tasks}
    logs = incremental.fit_stream(
        model, batches(), callbacks=Dies(), after_window=lambda *_: dies("before-end"), **settings
    )
    assert len(logs) == 3 == len(tasks.logs), logs
    return model, replay


if __name__ == "__main__":
    tfgpu.environment.set_logical_devices(2)
    if replicas == "workers":
        strategy = tfgpu.strategy("multi_worker", devices=1)
    else:
        devices = [f"CPU:{number}" for number in range(int(replicas))]
        strategy = tfgpu.strategy("mirrored" if len(devices) > 1 else "one_device", devices=devices)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        made = model_of({"tasks": 2}.get(how, 6))
    trained, kept = {"tasks": in_tasks, "online": online, "stream": stream}[how](made)
    iterations = [np.asarray(v) for v in trained.optimizer.variables]
    place = os.environ.get("TF_CONFIG")
    rank = f"-{json.loads(place)['task']['index']}" if place else ""
    np.savez(f"{folder}{rank}.npz", *trained.get_weights(), *iterations, *kept.arrays, np.array(kept.seen))
