"""A small training with parameter servers that `tfgpu launch --ps` starts: `served.py FOLDER HOW [EPOCHS]`.

`HOW` is `fit` or `trainer`. Each process writes into `FOLDER/events` what happened to it, and when; whoever runs a step
says `computes`. The chief writes `FOLDER/end.npz`. While there is a file `FOLDER/slow`, the data of the first attempt
comes slowly from the middle of its second epoch on.
"""

import json
import os
import sys
import time
from pathlib import Path

ROWS, BATCH, STEP_S, SLOW_S = 240, 8, 0.05, 0.3


def note(folder: Path, event: str) -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    row = [time.monotonic(), event, int(os.environ["TFGPU_ATTEMPT"]), f"{task['type']}{task['index']}", os.getpid()]
    with open(folder / "events", "ab", buffering=0) as file:  # one write: processes share the file
        file.write(f"{json.dumps(row)}\n".encode())


def table():
    """Inputs and labels."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32")


def validation():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(table()).batch(32)


def build():
    """The compiled model, for the strategy's scope."""
    import keras
    import tensorflow as tf

    class Says(keras.layers.Layer):
        """Says in whose process a step runs, and gives it a length."""

        def call(self, x, training=False):
            if not training:
                return x
            end = tf.timestamp() + STEP_S
            with tf.control_dependencies([tf.print("computes", output_stream=sys.stderr)]):
                waited = tf.while_loop(lambda now: now < end, lambda _: [tf.timestamp()], [tf.timestamp()])
            with tf.control_dependencies(waited):
                return tf.identity(x)

    class Rows(keras.metrics.Metric):
        """Counts the examples."""

        def __init__(self):
            super().__init__(name="rows")
            self.rows = self.add_variable((), "zeros", name="count")

        def update_state(self, y, y_pred, sample_weight=None):
            self.rows.assign_add(tf.cast(tf.shape(y)[0], "float32"))

        def result(self):
            return self.rows

    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), Says(), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy", Rows()])
    return model


def batches(folder: Path):
    """The rows in order, from a place that can be slow."""
    import tensorflow as tf

    x, y = table()
    passes = []

    def rows():
        passes.append(1)
        for at in range(ROWS):
            is_late = len(passes) > 2 or (len(passes) == 2 and at >= ROWS // 2)
            if len(passes) == 2 and at == ROWS // 2:
                note(folder, "middle")
            if at % BATCH == 0 and is_late and os.environ["TFGPU_ATTEMPT"] == "1" and (folder / "slow").exists():
                time.sleep(SLOW_S)
            yield x[at], y[at]

    spec = tf.TensorSpec((6,), tf.float32), tf.TensorSpec((), tf.int32)
    data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(BATCH)
    return data.apply(tf.data.experimental.assert_cardinality(ROWS // BATCH))


def main(folder: Path, how: str, epochs: int) -> None:
    import keras
    import numpy as np

    import tfgpu

    class Moments(keras.callbacks.Callback):
        """Notes how far the training is."""

        def on_epoch_begin(self, epoch, logs=None):
            note(folder, f"epoch {epoch}")

    with tfgpu.strategy().scope():  # workers and servers stay in this line
        model = build()
    if tfgpu.Cluster.from_environment().task_type == "evaluator":
        tfgpu.asynchronous.evaluate_checkpoints(model, validation(), folder / "saved", last_epoch=epochs)
        note(folder, "evaluated")
        return
    callbacks = [tfgpu.callbacks.Checkpoint(folder / "saved", keep=100), Moments()]
    fit = tfgpu.Trainer(model).fit if how == "trainer" else model.fit
    history = fit(batches(folder), epochs=epochs, validation_data=validation(), verbose=0, callbacks=callbacks).history
    np.savez(folder / "end.npz", *model.get_weights(), iterations=int(model.optimizer.iterations), **history)
    note(folder, "end")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    note(where, "start")
    main(where, sys.argv[2], int(sys.argv[3]))
