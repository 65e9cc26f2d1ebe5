"""A training that the tests of faults start, kill, and start again: `train.py VARIANT RUN_DIRECTORY [OPTION=VALUE...]`.

Each process writes, so that a test can end it at a chosen moment, `progressN`, a byte at each block of steps, and
`phasesN`, a byte where a phase begins: `S` the start, `E` an epoch, `V` a validation, `B` what is between two epochs;
`W` and `w` a write and its end, which are beside those. With `hold=["E", 2, 0]` process 0 stays in its second epoch
until it is killed, however late that is. `clockN`, the time of day as each epoch begins; `beganN`, the
step at which each start went on. The chief writes at each epoch's end `reads.npy`, which examples each step was trained
on; when it is done, `result.npz` and `history.json`.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

VARIANTS = {
    "fit": {},
    "trainer": {"by_trainer": True, "dataset": "shuffled"},
    "multi-step": {"steps_per_execution": 4},
    "accumulate": {"accumulate": 2, "ema": True, "dataset": "pipeline"},
    "mixed": {"accumulate": 2, "mixed": True},
    "mirrored": {"devices": 2, "accumulate": 2},
    "workers": {"devices": None, "accumulate": 2, "ema": True},
    "mirrored-mixed": {"devices": 2, "accumulate": 2, "mixed": True, "steps_per_execution": 4},
    "workers-mixed": {"devices": None, "accumulate": 2, "mixed": True, "steps_per_execution": 4, "dataset": "pipeline"},
    "workers-trainer": {"devices": None, "by_trainer": True, "dataset": "shuffled"},
}
ROWS, EPOCHS, BATCH = 26, 4, 4
STEPS = -(-ROWS // BATCH)  # of an epoch


def slowed(stock, seconds: float):
    def call(*arguments, **options):
        time.sleep(seconds)
        return stock(*arguments, **options)

    return call


def told(stock, phases, *, before: bytes = b"", after: bytes = b""):
    def call(*arguments, **options):
        phases.write(before)
        result = stock(*arguments, **options)
        phases.write(after)
        return result

    return call


class Phases:
    """Writes where the training is; never leaves the phase that it is held in."""

    def __init__(self, path: Path, hold: bytes, nth: int):
        self._file, self._hold, self._left = open(path, "ab", buffering=0), hold, nth
        self._ends = {b"W": b"w"}.get(hold, b"SEVB")

    def write(self, phase: bytes) -> None:
        while phase and self._hold and not self._left and phase in self._ends:
            time.sleep(1)
        self._left -= phase == self._hold
        self._file.write(phase)


def main(variant: str, folder: str, *options: str) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu
    from tfgpu import environment
    from tfgpu.checkpoint.parts_writer import PartsWriter

    what = {**VARIANTS[variant], **{name: json.loads(value) for name, value in (o.split("=") for o in options)}}
    folder, devices = Path(folder), what.get("devices", 1)
    rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    epochs = what.get("epochs", EPOCHS)
    hold, nth, whom = what.get("hold", ("", 0, 0))
    phases = Phases(folder / f"phases{rank}", hold.encode() if whom == rank else b"", nth)
    clock = open(folder / f"clock{rank}", "ab", buffering=0)
    if what.get("slow_disk"):
        for name in ("fsync", "rename"):
            setattr(os, name, slowed(getattr(os, name), what["slow_disk"]))
    make_job = PartsWriter.job
    PartsWriter.job = lambda *args: told(make_job(*args), phases, before=b"W", after=b"w")
    if devices and devices > 1:
        environment.set_logical_devices(devices)
    kinds = {None: "multi_worker", 1: "one_device"}
    strategy = tfgpu.strategy(kinds.get(devices, "mirrored"), devices=None if devices in kinds else devices)
    keras.utils.set_random_seed(1)
    if what.get("mixed"):
        keras.config.set_dtype_policy("mixed_float16")

    class Read(keras.layers.Layer):
        """Takes the number of an example off its row, and keeps which ones each step is trained on."""

        def build(self, shape):
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="steps")
            self.reads = self.add_weight(
                shape=(epochs * STEPS, ROWS), initializer="zeros", trainable=False, aggregation="sum", name="reads"
            )

        def call(self, x, training=False):
            if training:
                numbers = tf.cast(x[:, 0], tf.int32)
                rows = tf.reduce_sum(tf.one_hot(numbers, ROWS), axis=0)
                self.reads.assign_add(tf.one_hot(self.steps.value, epochs * STEPS)[:, None] * rows[None])
                self.steps.assign_add(1)
            return x[:, 1:]

    class Slow(keras.callbacks.Callback):
        """Gives the tests time, and tells them how far the training is."""

        every_batch = False

        def __init__(self):
            super().__init__()
            self.file = open(folder / f"progress{rank}", "ab", buffering=0)

        def tell(self, kind):
            self.file.write(kind)
            self.pause()

        def pause(self):
            time.sleep(what.get("pause", 0.01))

        def on_train_begin(self, logs=None):
            with open(folder / f"began{rank}", "a") as file:
                print(int(self.model.layers[0].steps.numpy()), file=file)
            self.pause()

        def on_epoch_begin(self, epoch, logs=None):
            self.pause()
            clock.write(f"{time.time()}\n".encode())
            phases.write(b"E")

        def on_train_batch_end(self, batch, logs=None):
            self.tell(b"t")

        def on_test_begin(self, logs=None):
            phases.write(b"V")
            self.pause()

        def on_test_batch_end(self, batch, logs=None):
            self.tell(b"v")

        def on_test_end(self, logs=None):
            phases.write(b"B")

        def on_epoch_end(self, epoch, logs=None):
            if rank == 0:
                np.save(folder / "reads.part.npy", self.model.layers[0].reads.numpy())
                os.replace(folder / "reads.part.npy", folder / "reads.npy")
            self.tell(b"e")

    rng = np.random.default_rng(0)
    numbers = np.arange(ROWS, dtype="float32")[:, None]
    x = np.concatenate([numbers, rng.normal(size=(ROWS, 5)).astype("float32")], axis=1)
    y = (x[:, 1:2] > x[:, 2:3]).astype("float32")
    held = rng.normal(size=(10, 6)).astype("float32")
    feeds = {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
        "shuffled": lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)},
        "pipeline": lambda: {"x": tfgpu.data.load((x, y[:, 0]), global_batch=BATCH, validation=0, test=0).train},
    }
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="float32"),
                Read(dtype="float32"),
                keras.layers.Dense(8, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1, "sigmoid", dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.AdamW(
            0.05,
            gradient_accumulation_steps=what.get("accumulate"),
            use_ema=what.get("ema", False),
            global_clipnorm=1.0,
        )
        if what.get("mixed"):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=5)
        steps = what.get("steps_per_execution", 1)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], steps_per_execution=steps)
    stop = keras.callbacks.EarlyStopping(patience=what.get("patience", 2), restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.05)
    disk = folder / (f"checkpoints{rank}" if what.get("own_disk") else "checkpoints")
    checkpoint = tfgpu.callbacks.Checkpoint(disk, every_steps=what.get("every_steps", 3))
    callbacks = [checkpoint, stop, plateau, Slow()]
    fit = tfgpu.Trainer(model, steps_per_call=2).fit if what.get("by_trainer") else model.fit
    phases.write(b"S")
    history = fit(
        **feeds[what.get("dataset", "arrays")](),
        epochs=epochs,
        validation_data=(held, (held[:, 1:2] > 0).astype("float32")),
        callbacks=callbacks,
        verbose=0,
    )
    state = [v.numpy() for v in (*model.weights, *optimizer.variables)]
    if strategy.extended.should_checkpoint:
        np.savez(folder / "result.npz", *state)
        (folder / "history.json").write_text(json.dumps(history.history))


if __name__ == "__main__":
    main(*sys.argv[1:])
