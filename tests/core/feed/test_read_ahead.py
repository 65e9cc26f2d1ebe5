"""Batches that are read ahead to a GPU: the same batches, errors and orders. `CPU:1` stands for a GPU."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import input_stats, iterator_end, step_blocks
from tfgpu.core.feed import read_ahead

ROWS, BATCH = 50, 8
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, ROWS)
SHIFT = tf.Variable(1.0)
DETERMINISTIC = """
import gpu_way, keras, numpy as np, tensorflow as tf, tfgpu
tfgpu.environment.set_logical_devices(2)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(0)
with gpu_way.gpu_way(), tfgpu.strategy("one_device", devices="CPU:1").scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((np.ones((4, 1)), np.ones(4))).batch(2), verbose=0)
print("trained")
"""


def slices(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def generated(rows=lambda: zip(X, Y, strict=True)):
    signature = tf.TensorSpec([4]), tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(BATCH)


DATA = {
    "shuffled": lambda: slices().shuffle(ROWS, seed=3).batch(BATCH),
    "drawn": lambda: slices().batch(BATCH).map(lambda x, y: (x + tf.random.normal([4], seed=1), y)).prefetch(2),
    "static": lambda: slices().batch(BATCH, drop_remainder=True),
    "unknown length": lambda: slices().filter(lambda x, y: x[0] > -1).batch(BATCH),
    "repeated": lambda: slices().batch(BATCH).repeat(),
    "generator": lambda: generated().prefetch(1),
    "int32": lambda: slices(y=Y.astype("int32")).batch(BATCH, drop_remainder=True),
    "uint8": lambda: slices((100 * X).astype("uint8")).batch(BATCH),
    "weights": lambda: tf.data.Dataset.from_tensor_slices((X, Y, np.abs(X[:, 0]))).batch(BATCH),
}
NOT_READ_AHEAD = {
    "generator": generated,
    "strings": lambda: tf.data.Dataset.from_tensor_slices((Y.astype(str), Y)).batch(BATCH),
    "tokens": lambda: slices((9 * X).astype("int32")).batch(BATCH),
    "ragged": lambda: slices().batch(BATCH).map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y)),
    "shuffled and repeated": lambda: slices().shuffle(ROWS).repeat().batch(BATCH),
    "shuffled in a function": lambda: tf.data.Dataset.range(3).flat_map(lambda _: slices().shuffle(ROWS)).batch(BATCH),
    "a variable": lambda: slices().map(lambda x, y: (x + SHIFT, y)).batch(BATCH),
}


@pytest.fixture
def strategy():
    with gpu_way.gpu_way():
        yield tfgpu.strategy("one_device", devices="CPU:1")


def model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        made = keras.Sequential([keras.Input((4,)), *layers])
        made.compile("adam", keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    return made


def trained(strategy, make):
    made = model(strategy)
    data = make()  # with the model's seed
    history = made.fit(data, epochs=3, steps_per_epoch=6, verbose=0).history
    evaluated = made.evaluate(data, steps=4, verbose=0)
    return [*made.get_weights(), np.array([*history.values()]), np.array(evaluated), made.predict(data, 8, 0, 3)]


@pytest.mark.sample("unknown length", "generator")
@pytest.mark.parametrize("name", DATA)
def test_training_on_batches_that_are_read_ahead_is_the_same(name, strategy, monkeypatch):
    assert isinstance(read_ahead.read_ahead(strategy, DATA[name]()), read_ahead.ReadAhead)
    ahead = trained(strategy, DATA[name])
    monkeypatch.setattr(read_ahead, "read_ahead", lambda strategy, dataset: dataset)
    for one, other in zip(ahead, trained(strategy, DATA[name]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NOT_READ_AHEAD)
def test_what_may_depend_on_the_steps_or_cannot_be_on_a_gpu_is_not_read_ahead(name, strategy):
    data = NOT_READ_AHEAD[name]()
    assert read_ahead.read_ahead(strategy, data) is data


def test_labels_in_int32_go_with_pictures(strategy):
    data = slices(np.ones((ROWS, 4, 4, 3), "uint8"), Y.astype("int32")).batch(BATCH)
    assert isinstance(read_ahead.read_ahead(strategy, data), read_ahead.ReadAhead)


def test_a_cpu_reads_nothing_ahead():
    data = slices().batch(BATCH)
    assert read_ahead.read_ahead(tfgpu.strategy("one_device", devices="CPU:1"), data) is data


def test_batches_come_on_the_device(strategy):
    data = slices().batch(BATCH)
    iterator = iter(read_ahead.read_ahead(strategy, data))
    assert next(iterator)[0].device.endswith("CPU:1") and read_ahead.device_of(iterator) == "CPU:1"
    assert read_ahead.device_of(iter(data)) is None and len(iterator_end.resources(iterator)) == 2


def test_an_iterator_and_its_data_are_gone_with_their_last_use(strategy):
    gc.disable()
    try:
        data = slices().batch(BATCH)
        iterator = iter(read_ahead.read_ahead(strategy, data))
        next(iterator)
        gone = weakref.ref(iterator), weakref.ref(data)
        del iterator, data
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_each_iterator_draws_its_order_when_it_is_made(strategy):
    def orders(data):
        made = [iter(data) for _ in range(3)]
        return [[batch[1].numpy().tolist() for batch in each] for each in (made[2], made[0])]

    keras.utils.set_random_seed(0)
    plain = orders(DATA["shuffled"]())
    keras.utils.set_random_seed(0)
    assert orders(read_ahead.read_ahead(strategy, DATA["shuffled"]())) == plain


def test_data_that_fails_ends_after_the_last_whole_step(strategy):
    def rows():
        for number, row in enumerate(zip(X, Y, strict=True)):
            if number == 30:
                raise ValueError("row 30 is broken")
            yield row

    made = model(strategy)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 30 is broken"):
        made.fit(generated(rows).prefetch(1), verbose=0)
    assert int(made.optimizer.iterations.numpy()) == 3


def test_the_wait_for_data_is_measured(strategy):
    class Waits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            run = step_blocks.current()
            self.found = input_stats.computing_s(run), run.block.computing_s

    waits = Waits()
    model(strategy).fit(slices().batch(BATCH), epochs=9, verbose=0, callbacks=[waits])
    assert waits.found[0] == waits.found[1] > 0


@pytest.mark.slow
def test_a_deterministic_step_reads_no_clock():
    path = os.pathsep.join([str(Path(gpu_way.__file__).parent), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", DETERMINISTIC], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "trained", done.stderr[-2000:]
