"""A `fit` that fails repeatedly in one process, and resumes from its checkpoint.

`soak.py FOLDER TIMES DEVICES EPOCHS` prints after each failure what the process holds, and writes the weights at the
end into `FOLDER.npz`.
"""

import gc
import json
import os
import random
import sys
import threading

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

import tfgpu  # noqa: E402
from tfgpu import environment  # noqa: E402
from tfgpu.core import iterator_end

folder, times, devices, epochs = sys.argv[1], *map(int, sys.argv[2:])


class Failure(Exception):
    """What the training fails with."""


class Fails(keras.callbacks.Callback):
    every_batch = has_memory = False

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Failure


if devices > 1:
    environment.set_logical_devices(devices)
keras.utils.set_random_seed(0)
rng, draw, own = np.random.default_rng(0), random.Random(0), psutil.Process()
x, y = rng.normal(size=(90, 6)).astype("float32"), rng.integers(0, 3, 90)
# It begins an epoch by its number: `fit` on arrays would pass over all that lie before, 200 times.
data = tfgpu.data.load((x, y), global_batch=8, validation=0, test=0, seed=0).train
with tfgpu.strategy("mirrored" if devices > 1 else "one_device", devices=devices).scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), loss, metrics=["accuracy"])


def fit(*callbacks) -> keras.callbacks.History:
    checkpoint = tfgpu.callbacks.Checkpoint(folder, every_steps=3)
    return model.fit(data, epochs=epochs, verbose=0, callbacks=[checkpoint, *callbacks])


for number in range(times):
    try:
        fit(Fails(draw.randint(1, 7)))
    except Failure:
        pass
    else:
        sys.exit("It was over before the last failure.")
    if number % 25 == 24:
        gc.collect()
    iterator_end.wait()  # What waits for the end of data is under way, and not kept.
    held = {"rss": own.memory_info().rss, "files": own.num_fds(), "threads": own.num_threads()}
    held |= {"python threads": threading.active_count(), "folders": len(os.listdir(folder))}
    print(json.dumps({"failures": number + 1, **held}), flush=True)
history = fit()
np.savez(f"{folder}.npz", *model.get_weights(), *(v.numpy() for v in model.optimizer.variables), **history.history)
