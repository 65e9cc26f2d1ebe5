"""A small training that `tfgpu launch` starts, and its faults: `small.py FOLDER FAULT [EPOCHS]`.

Each process writes into `FOLDER/events` what happened to it, and when; the chief writes the weights into `end.npz`. All
faults but the random ones happen in the first attempt, on worker 1.
"""

import json
import os
import random
import signal
import sys
import threading
import time

folder, fault = sys.argv[1:3]
epochs = int(sys.argv[3]) if len(sys.argv) > 3 else 4
rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
attempt = int(os.environ["TFGPU_ATTEMPT"])
LAST_FAULT = int(os.environ.get("LAST_FAULT", "0"))  # the attempt after which no more random ones come
is_hit = rank == 1 and attempt == 1


def note(event: str) -> None:
    with open(f"{folder}/events", "ab", buffering=0) as file:  # one write: processes share the file
        file.write(f"{json.dumps([time.monotonic(), event, attempt, rank, os.getpid()])}\n".encode())


note("start")
if is_hit and fault == "sleeps":
    time.sleep(3600)
if is_hit and fault in ("leaves", "stock"):
    sys.exit(0)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfgpu  # noqa: E402


class Faults(keras.callbacks.Callback):
    """Notes how far the training is, and stops or kills the process."""

    every_batch = has_memory = False

    def __init__(self):
        super().__init__()
        self.blocks, draw = 0, random.Random(attempt)
        is_victim = fault == "random" and draw.randrange(2) == rank and attempt <= LAST_FAULT
        self.end, self.delay_s = draw.randint(1, 6) if is_victim else None, draw.uniform(0, 0.02)

    def on_train_begin(self, logs=None):
        note(f"begins at {int(self.model.optimizer.iterations.numpy())}")  # the checkpoint was restored before

    def on_train_batch_end(self, batch, logs=None):
        self.blocks += 1
        if self.blocks == 1:
            note("trains")
        if self.blocks == self.end:
            threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self.epoch == 1 and attempt == 1 and fault == "slow":
            note("middle")
            note(f"step {int(self.model.optimizer.iterations.numpy())}")
            time.sleep(0.5)
        if self.epoch == 1 and batch < 11 and fault == "stopped" and is_hit:
            note("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if (epoch, fault, is_hit) == (2, "killed", True):
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(90, 6)).astype("float32"), rng.integers(0, 3, 90)
make = tf.distribute.MultiWorkerMirroredStrategy if fault == "stock" else tfgpu.strategy
with make().scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), loss)
callbacks = [tfgpu.callbacks.Checkpoint(f"{folder}/checkpoints", every_steps=5), Faults()]
history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
if rank == 0:
    np.savez(f"{folder}/end.npz", *model.get_weights(), loss=history.history["loss"])
note("end")
