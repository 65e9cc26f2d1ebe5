"""Two workers train on sparse rows and labels as one device, in `fit` and in a `strategy.run` loop."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu

strategy = tf.distribute.get_strategy() if sys.argv[1] == "one" else tfgpu.strategy("multi_worker", devices=["CPU:0"])
draw = np.random.default_rng(0)
x = np.where(draw.random((22, 9)) < 0.3, draw.normal(size=(22, 9)), 0).astype("float32")
x[5] = 0
sparse, y = tf.sparse.from_dense(x), np.arange(22) % 3
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(loss, is_sparse=True, units=3):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((9,), sparse=is_sparse), keras.layers.Dense(units)])
        model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def rows(x, y, size=7):  # the last batch has one row
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def squares(y, p):
    return tf.reduce_mean((tf.sparse.to_dense(y) - p) ** 2, -1)


said = {}
model = made(losses)
model.fit(rows(sparse, y), epochs=2, verbose=0)
said["fit"] = [np.ravel(each).tolist() for each in (*model.get_weights(), model.predict(rows(sparse, y), verbose=0))]
said["fit"].append([model.evaluate(rows(sparse, y), verbose=0)])
model = made(squares, False, 9)
model.fit(rows(x, sparse), epochs=2, verbose=0)
said["labels"] = [np.ravel(each).tolist() for each in model.get_weights()]

model = made(losses)
with strategy.scope():
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)


def step(x, y):
    with tf.GradientTape() as tape:
        each = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        loss = tf.nn.compute_average_loss(each, global_batch_size=7)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


run = tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None))
found = [float(run(*each)) for each in strategy.experimental_distribute_dataset(rows(sparse, y))]
said["run"] = [found, *(np.ravel(each).tolist() for each in model.get_weights())]
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_with_sparse_rows_are_one_device(together):
    found = together(SCRIPT, {"worker": 2}, "workers")
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "one"], env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one = json.loads(done.stdout.splitlines()[-1])
    for each in found.values():
        for name, values in one.items():
            for value, other in zip(values, each[name], strict=True):
                np.testing.assert_allclose(value, other, atol=2e-6, err_msg=name)
