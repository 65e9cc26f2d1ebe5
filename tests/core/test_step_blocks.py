"""`fit` in blocks of steps: callbacks see the blocks, and nothing else changes."""

import contextlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import step_blocks

pytestmark = pytest.mark.sample("two replicas")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(56, 4)).astype("float32")
Y = RNG.integers(0, 3, 56)


@pytest.fixture(params=["no strategy", "one device", "two replicas"])
def strategy(request):
    tfgpu.repair_keras()
    return {
        "no strategy": tf.distribute.get_strategy,
        "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "two replicas": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }[request.param]()


def build(strategy, cls=keras.Sequential, **compiled):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = cls([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compiled)
    return model


class Recorder(keras.callbacks.Callback):
    every_batch = False

    def __init__(self):
        super().__init__()
        self.ends, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(batch)
        self.losses.append(logs["loss"])


def data(*, batches=7, is_known=True):
    found = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(batches)
    return found if is_known else found.filter(lambda x, y: True)


@pytest.mark.sample("False")
@pytest.mark.parametrize("is_known", [True, False])
def test_the_last_block_ends_with_the_data(strategy, is_known):
    recorder, model = Recorder(), build(strategy)
    model.fit(data(is_known=is_known), epochs=3, verbose=0, callbacks=[recorder])
    assert int(model.optimizer.iterations.numpy()) == 21
    assert recorder.ends.count(6) == 3 and max(recorder.ends) == 6
    assert len(recorder.ends) < 21


def _fails_at(broken: int) -> tf.data.Dataset:
    """A dataset that announces seven batches, of which one cannot be read."""

    def check(at, batch):
        with tf.control_dependencies([tf.debugging.assert_none_equal(at, np.int64(broken), message="broken")]):
            return tf.nest.map_structure(tf.identity, batch)

    return data().enumerate().map(check).prefetch(1)


@pytest.mark.slow
def test_data_that_fails_leaves_the_state_of_the_last_whole_step(strategy):
    found = []
    for batches, batch_list in ((7, _fails_at(5)), (5, data(batches=5))):
        model = build(strategy)
        with strategy.scope():
            noisy = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=1), model])
            noisy.compile(model.optimizer, model.loss, metrics=["accuracy"])
        failing = pytest.raises(tf.errors.InvalidArgumentError, match="broken")
        with failing if batches == 7 else contextlib.nullcontext(), step_blocks.fixed_steps_per_call(7):
            noisy.fit(batch_list, verbose=0)
        seed = next(layer for layer in noisy.layers if isinstance(layer, keras.layers.Dropout)).seed_generator
        found.append([int(noisy.optimizer.iterations.numpy()), *map(np.array, [seed.state, *noisy.get_weights()])])
    assert found[0][0] == 5
    for failed, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(failed, whole)


def test_one_cpu_reads_plain_data(strategy):
    """TensorFlow's distributed iterator takes three times as long as a small model's step."""
    model, seen = build(strategy), []

    class Look(keras.callbacks.Callback):
        every_batch = False

        def on_train_batch_end(self, batch, logs=None):
            seen.append(type(step_blocks.current().block.iterator))

    model.fit(data(), verbose=0, callbacks=[Look()])
    assert seen and not any(issubclass(kind, tf.distribute.DistributedIterator) for kind in seen)


def test_blocks_grow_until_they_take_long_enough():
    pace, steps = step_blocks.Pace(), []
    for seconds in (9.0, 0.001, 0.002, 0.004, 0.008, 0.11, 0.11):
        steps.append(pace.steps)
        pace.note(pace.steps, seconds)
    assert steps == [1, 1, 2, 4, 8, 16, 16]
    pace.note(3, 0.001)  # a short block, at the data's end, tells nothing
    assert pace.steps == 16


def test_blocks_with_collectives_grow_until_their_records_are_small():
    """41 collectives of 1,600 bytes are less than 1,024 bytes a step in 65 steps."""
    pace, steps = step_blocks.Pace(), []
    for _ in range(9):
        steps.append(pace.steps)
        pace.note(pace.steps, 0.01 * pace.steps, collectives=41)
    assert steps == [1, 2, 4, 8, 16, 32, 64, 128, 128]


def test_blocks_with_collectives_take_four_seconds_at_most():
    pace = step_blocks.Pace()
    for _ in range(9):
        pace.note(pace.steps, 0.3 * pace.steps, collectives=110)
    assert pace.steps == 8


@pytest.mark.slow
def test_a_block_without_its_first_batches_has_fewer_full_ones():
    block = step_blocks.Block(None, 8, True, begin=3, rows=26, full=6)
    assert block.skip(2) == step_blocks.Block(None, 6, True, begin=5, rows=26, full=4)
    assert block.skip(7) == step_blocks.Block(None, 1, True, begin=10, rows=26, full=0)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["auto", 1])
def test_a_callback_with_batch_hooks_is_called_after_each_batch(asked):
    seen = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = build(tf.distribute.get_strategy(), steps_per_execution=asked)
    model.fit(data(), epochs=3, verbose=0)  # blocks have grown
    model.fit(data(), verbose=0, callbacks=each)
    assert seen == list(range(7))


def test_which_stock_callbacks_have_batch_hooks(tmp_path):
    c = keras.callbacks
    path = str(tmp_path / "m.keras")
    epochs_only = [
        c.History(),
        c.ModelCheckpoint(path),
        c.BackupAndRestore(tmp_path),
        c.TensorBoard(tmp_path),
        c.EarlyStopping(),
        c.CSVLogger(path),
        c.LearningRateScheduler(lambda epoch: 0.1),
        c.ReduceLROnPlateau(),
        c.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    assert [type(x).__name__ for x in epochs_only if step_blocks.needs_every_batch(x)] == []
    each_batch = [
        c.ModelCheckpoint(path, save_freq=2),
        c.BackupAndRestore(tmp_path, save_freq=3),
        c.TensorBoard(tmp_path, update_freq="batch"),
        c.TensorBoard(tmp_path, profile_batch=2),
        c.TerminateOnNaN(),
        c.LambdaCallback(on_train_batch_begin=lambda batch, logs: None),
    ]
    assert all(step_blocks.needs_every_batch(x) for x in each_batch)
    at_test = c.LambdaCallback(on_test_batch_end=lambda batch, logs: None)
    assert step_blocks.needs_every_batch(at_test, "test") and not step_blocks.needs_every_batch(at_test)


def test_validation_runs_in_blocks_too(strategy):
    class Ends(keras.callbacks.Callback):
        every_batch, ends = False, []

        def on_test_batch_end(self, batch, logs=None):
            self.ends.append(batch)

    model = build(strategy)
    model.fit(data(), epochs=4, validation_data=data(batches=6), verbose=0, callbacks=[Ends()])
    assert Ends.ends.count(5) == 4 and len(Ends.ends) < 24
    seen = []
    each = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))
    model.evaluate(data(batches=6), verbose=0, callbacks=[each])
    assert seen == list(range(6))


def normalized(layers):
    return keras.Sequential([layers[0], keras.layers.BatchNormalization(), *layers[1:]])


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_functions_that_run_eagerly_train_the_same(strategy, is_known):
    """`tf.config.run_functions_eagerly` is how TensorFlow's users debug a step."""
    weights = []
    for is_eager in (False, True):
        tf.config.run_functions_eagerly(is_eager)
        try:
            model = build(strategy, normalized)
            model.fit(data(is_known=is_known), epochs=2, verbose=0)
            weights.append(model.get_weights() + [model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)])
        finally:
            tf.config.run_functions_eagerly(False)
    for found, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_custom_step_with_logs_of_any_shape(strategy):
    class Own(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            x, _ = data
            return {**logs, "rows": tf.cast(tf.shape(x)[0], tf.float32), "three": tf.ones([3]) * 2.0}

    own, plain = build(strategy, Own), build(strategy)
    recorder = Recorder()
    history = own.fit(data(), epochs=3, verbose=0, callbacks=[recorder]).history
    expected = plain.fit(data(), epochs=3, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert len(recorder.ends) < 21
    np.testing.assert_array_equal(history["three"], np.full((3, 3), 2.0))


@pytest.mark.slow
def test_a_model_without_a_known_input_is_built_in_the_first_block():
    tfgpu.repair_keras()
    weights = []
    for steps in (1, 3):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps)
        model.fit(data(), epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert all((a == b).all() for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_fitting_again_traces_nothing(strategy):
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traces.append(1)
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Counted(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = data()
    model.fit(batches, epochs=2, validation_data=batches, verbose=0)
    before = len(traces)
    model.fit(batches, epochs=2, validation_data=batches, verbose=0)
    assert len(traces) == before


@pytest.mark.slow
def test_a_custom_dataset_is_told_the_same_epochs():
    class Told(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.heard = []

        def __len__(self):
            return 7

        def __getitem__(self, index):
            return X[index * 8 :][:8], Y[index * 8 :][:8]

        def on_epoch_begin(self):
            self.heard.append("begin")

        def on_epoch_end(self):
            self.heard.append("end")

    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    by_batch, by_block = Told(), Told()
    for told, callbacks in ((by_batch, [each]), (by_block, [])):
        build(tf.distribute.get_strategy()).fit(told, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert by_block.heard == by_batch.heard and by_block.heard.count("begin") == 2


def test_stopping_between_blocks():
    class Stop(Recorder):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.model.stop_training = True

    stop, model = Stop(), build(tf.distribute.get_strategy())
    model.fit(data(), epochs=3, verbose=0, callbacks=[stop])
    assert stop.ends == [0] and int(model.optimizer.iterations) == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "many"])
def test_a_wrong_number_of_steps_is_one_clear_error(wrong):
    with pytest.raises(tfgpu.InputError, match='a whole number of at least 1, or "auto"'):
        build(tf.distribute.get_strategy(), steps_per_execution=wrong)


def test_a_numpy_number_is_accepted():
    assert build(tf.distribute.get_strategy(), steps_per_execution=np.int64(2)).steps_per_execution == 2


@pytest.mark.slow
def test_a_model_with_auto_is_read_by_stock_keras(tmp_path):
    build(tf.distribute.get_strategy(), steps_per_execution="auto").save(tmp_path / "m.keras")
    code = (
        "import keras, numpy as np, sys\n"
        "m = keras.models.load_model(sys.argv[1])\n"
        "m.fit(np.ones((4, 4)), np.zeros(4), verbose=0)\n"
        "print(m.steps_per_execution)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.keras")]
    out = subprocess.run(command, env={**os.environ, "TFGPU_REPAIR": "0"}, capture_output=True, text=True, timeout=550)
    assert out.stdout.split()[-1:] == ["1"], out.stderr[-2000:]


WORKER = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf, tfgpu

strategy = tfgpu.strategy("multi_worker")
seen = []
each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
is_chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
x = np.arange(24.0, dtype="float32").reshape(12, 2)
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
model.fit(data, epochs=4, verbose=0)
grown = model.train_function.pace.steps
model.fit(data, verbose=0, callbacks=[each] if is_chief else None)
model.fit(strategy.experimental_distribute_dataset(data), verbose=0, callbacks=[each] if is_chief else None)
print(json.dumps({"seen": seen, "grown": grown, "iterations": int(model.optimizer.iterations.numpy())}), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_callback_only_on_the_chief_does_not_hang(together):
    found = together(WORKER, {"worker": 2}, timeout=550)
    assert found["worker0"]["seen"] == 2 * list(range(6)) and found["worker1"]["seen"] == []
    assert {facts["iterations"] for facts in found.values()} == {36}
    assert len({facts["grown"] for facts in found.values()}) == 1


def test_another_fit_traces_nothing(strategy):
    class Counted(keras.Sequential):
        traces = 0

        def train_step(self, data):
            Counted.traces += 1
            return super().train_step(data)

    model = build(strategy, Counted)
    uneven = tf.data.Dataset.from_tensor_slices((X[:50], Y[:50])).batch(8)
    model.fit(uneven, epochs=2, verbose=0)
    before = Counted.traces
    for epoch in range(2, 5):
        model.fit(uneven, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    assert before > 0 and Counted.traces == before


COMPILE = """
import sys, keras, numpy as np, tensorflow as tf, tfgpu
tfgpu.environment.set_logical_devices(2)
strategy = tfgpu.strategy("mirrored", devices=2) if sys.argv[1] == "2" else tfgpu.strategy("one_device")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=True)
x, y = np.ones((50, 4), "float32"), np.arange(50) % 3
for epochs in range(int(sys.argv[2])):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_xla_compiles_an_uneven_last_batch_once(replicas, tmp_path):
    """XLA itself writes a file for each program that it compiles."""
    found = {}
    for fits in (2, 6):
        folder = tmp_path / str(fits)
        environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
        command = [sys.executable, "-c", COMPILE, str(replicas), str(fits)]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=550)
        found[fits] = len(list(folder.glob("*.before_optimizations.txt")))
    assert found[2] == found[6] > 0
