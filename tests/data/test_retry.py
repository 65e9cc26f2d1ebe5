"""Reading continues after errors, element by element; one error reports a source that keeps failing."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.compat import slots
from tfgpu.data import retry

ROWS = np.arange(24, dtype="float32").reshape(12, 2) / 10


class Drive:
    """Batches of two rows; reading element `at` fails the given number of times."""

    def __init__(self, fails: dict[int, int]):
        self.left, self.opened = dict(fails), 0

    def read(self):
        self.opened += 1
        for at in range(0, len(ROWS), 2):
            if self.left.get(at // 2, 0):
                self.left[at // 2] -= 1
                raise OSError("stale file handle")
            yield ROWS[at : at + 2], ROWS[at : at + 2, :1]

    def data(self) -> tf.data.Dataset:
        signature = tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.float32)
        return tf.data.Dataset.from_generator(self.read, output_signature=signature)


def trained(data, *callbacks, epochs=2):
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return [w.tobytes() for w in model.get_weights()], history["loss"]


@pytest.mark.slow
def test_training_on_a_drive_that_fails_ends_as_on_one_that_does_not():
    bad = Drive({0: 1, 3: 2, 5: 1})
    assert trained(retry(bad.data(), limit=2, wait_s=0)) == trained(Drive({}).data())
    assert not any(bad.left.values())


@pytest.mark.slow
def test_a_drive_that_keeps_failing_is_reported_and_checkpoints_stay(tmp_path):
    bad = Drive({4: 100})
    with pytest.raises(Exception, match=r"The data failed 3 times in a row after 4 elements: .*stale file handle"):
        trained(retry(bad.data(), limit=2, wait_s=0), Checkpoint(tmp_path, every_steps=1))
    bad.left = {}
    again = trained(retry(bad.data(), limit=2, wait_s=0), Checkpoint(tmp_path, every_steps=1))
    assert again == trained(Drive({}).data())


def test_options_stay_and_data_that_has_become_shorter_is_told():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    kept = retry(Drive({}).data().with_options(options)).options().experimental_distribute.auto_shard_policy
    assert kept == tf.data.experimental.AutoShardPolicy.OFF
    opened = []

    def shorter():
        opened.append(None)
        yield from range(5 if len(opened) == 1 else 2)
        if len(opened) == 1:
            raise OSError("gone")

    bad = tf.data.Dataset.from_generator(shorter, output_signature=tf.TensorSpec([], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="has fewer now that it was reopened"):
        list(retry(bad, wait_s=0))


def test_each_try_waits_twice_as_long(monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert len(list(retry(Drive({1: 3}).data(), limit=3, wait_s=0.5))) == 6
    assert waited == [0.5, 1.0, 2.0]


def test_permanent_errors_are_not_retried():
    bad = tf.data.Dataset.range(3).map(lambda n: tf.reshape(n, [tf.cast(n, tf.int32)]))  # 0 is no shape of one number
    with pytest.raises(tf.errors.InvalidArgumentError, match="The data cannot be read beyond 0 elements: .*shape"):
        list(retry(bad, wait_s=100.0))


def test_epochs_of_a_pipeline_repeat_their_order():
    data = tfgpu.data.load("digits", global_batch=64, seed=1)
    whole = [x.numpy().tobytes() for _ in range(2) for x, _ in data.train]
    data.seek(0)
    fails = {"left": 2}

    def fail_once(x, y):
        def check(n):
            if fails["left"] and n.sum() and len(seen) % 5 == 3:
                fails["left"] -= 1
                raise OSError("gone")
            seen.append(None)
            return n

        return tf.ensure_shape(tf.numpy_function(check, [x], x.dtype), x.shape), y

    seen = []
    flaky = data.train.map(fail_once)
    slots.of(flaky).epochs = slots.get(data.train, "epochs")
    again = retry(flaky, wait_s=0)
    assert int(again.cardinality()) == len(whole) // 2
    assert [x.numpy().tobytes() for _ in range(2) for x, _ in again] == whole and fails["left"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2],), "needs a tf.data.Dataset"),
        ((tf.data.Dataset.range(2), 0), "`limit` must be"),
        ((tf.data.Dataset.range(2), 1.5), "`limit` must be"),
        ((tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3]])),), "Apply it after `batch`"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(tfgpu.InputError, match=message):
        retry(*arguments)
    with pytest.raises(tfgpu.InputError, match="`wait_s` must be"):
        retry(tf.data.Dataset.range(2), wait_s=-1)


WORKER = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfgpu

keras.utils.set_random_seed(0)
strategy = tfgpu.strategy(sys.argv[1])
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
left = {"fails": 2 if strategy.cluster_resolver and strategy.cluster_resolver.task_id else 0}

def check(x):
    if left["fails"] and x[0] > 0.5:
        left["fails"] -= 1
        raise OSError("gone")
    return x

data = tf.data.TextLineDataset(sys.argv[2:]).map(lambda row: tf.strings.to_number(row)[None]).batch(2)
data = data.map(lambda x: tf.ensure_shape(tf.numpy_function(check, [x], tf.float32), (None, 1)))
history = model.fit(tfgpu.data.retry(data, wait_s=0).map(lambda x: (x, 2 * x)), epochs=2, verbose=0).history
print(json.dumps([model.get_weights()[0].tolist(), history["loss"], left["fails"]]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_continue_reading_after_one_file_fails(together, tmp_path):
    for at in range(3):
        (tmp_path / f"{at}.txt").write_text("".join(f"{row / 10}\n" for row in range(at * 4, at * 4 + 4)))
    files = sorted(map(str, tmp_path.glob("*.txt")))
    answers = together(WORKER, {"worker": 2}, "multi_worker", *files)
    command = [sys.executable, "-c", WORKER, "mirrored", *files]
    one = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=550, check=True).stdout)
    assert answers["worker0"][2] == answers["worker1"][2] == 0
    for found in answers.values():
        np.testing.assert_allclose(found[0], one[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], one[1], rtol=1e-6)
