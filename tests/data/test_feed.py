import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # noqa: F401  (read by skipif)

from tfgpu.cluster import Cluster
from tfgpu.data import feed, load, position
from tfgpu.data.assembly.epoch_spec import EpochSpec
from tfgpu.errors import InputError


def numbered(count):
    return np.arange(count, dtype=np.float32)[:, None], np.arange(count) % 2


def numbers(dataset):
    return np.concatenate([x.numpy()[:, 0] for x, _ in dataset]).astype(int).tolist()


def slow(examples_count):
    """Examples that are loaded one by one, the even ones late."""
    from tfgpu.data.examples import Examples

    def read(place):
        def wait(n):
            import time

            time.sleep(0.02 if n % 2 == 0 else 0.0)
            return np.float32([n])

        return tf.ensure_shape(tf.numpy_function(wait, [place], tf.float32), [1])

    labels = np.arange(examples_count) % 2
    return Examples("slow", labels, (1,), ("a", "b"), load=read)


def feed_of(examples, settings):
    order = tf.range(len(examples.labels), dtype=tf.int64)
    epochs = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
    change = lambda epoch, places, x, y: (x, places)  # noqa: E731
    return feed.batches(EpochSpec(examples, lambda _: order, len(order), 4, change), epochs, settings)


@pytest.mark.skipif("is_op_determinism_enabled()", reason="another test of this process has made TensorFlow repeatable")
def test_examples_that_are_ready_overtake_others_only_when_that_is_allowed():
    ordered = list(feed_of(slow(12), feed.Feed(parallel_calls=4)))
    assert np.concatenate([x.numpy()[:, 0] for x, _ in ordered]).tolist() == list(range(12))
    assert [int(place) for _, place in ordered] == [0, 4, 8]
    overtaken = list(feed_of(slow(12), feed.Feed(parallel_calls=4, deterministic=False)))
    got = np.concatenate([x.numpy()[:, 0] for x, _ in overtaken]).tolist()
    assert sorted(got) == list(range(12)) and got != list(range(12))
    assert np.concatenate([places.numpy() for _, places in overtaken]).tolist() == got  # each with its own place


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 2, "prefetch": 0, "parallel_calls": 1},
        {"prefetch_to_device": "auto", "prefetch": 3},
        {"prefetch_to_device": "cpu:1"},
    ],
)
def test_no_setting_changes_the_batches(settings):
    data = load(numbered(30), global_batch=7, seed=5, validation=0, test=0, **settings)
    for epoch in range(2):
        indices = tf.range(30, dtype=tf.int64)
        expected = position.order(indices, seed=5, epoch=tf.constant(epoch, tf.int64))
        assert numbers(data.train) == expected.numpy().tolist()


def test_batches_are_copied_to_the_device():
    data = load(numbered(30), global_batch=7, test=0.2, prefetch_to_device="CPU:1", prefetch=1)
    for part in (data.train, data.test):
        assert all(t.device.endswith("CPU:1") for t in next(iter(part)))


def test_the_settings_reach_tf_data():
    settings = {"threads": 3, "deterministic": False, "validation": 0, "test": 0}
    options = load(numbered(30), global_batch=7, **settings).train.options()
    assert options.threading.private_threadpool_size == 3 and options.deterministic is False


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"parallel_calls": 0}, "`parallel_calls` must be a whole number from 1"),
        ({"threads": 1.5}, "`threads`"),
        ({"prefetch": -1}, "`prefetch` must be a whole number from 0"),
        ({"deterministic": "yes"}, "`deterministic` must be true or false"),
        ({"prefetch_to_device": "GPU:7"}, "Unknown prefetch_to_device 'GPU:7'"),
        ({"deterministic": False, "cluster": Cluster(("a:1", "b:1"), 0, "worker", 0)}, "one order.*2 workers"),
    ],
)
def test_an_invalid_setting_names_the_fix(settings, message):
    with pytest.raises(InputError, match=message):
        load(numbered(30), global_batch=7, **settings)


def test_a_strategy_copies_by_itself():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), pytest.raises(InputError, match="its own devices"):
        load(numbered(30), global_batch=7, prefetch_to_device="auto")


REPEATABLE = """
import threading, time
import numpy as np, tensorflow as tf
tf.config.experimental.enable_op_determinism()
from tfgpu.data import feed, position
from tfgpu.data.assembly.epoch_spec import EpochSpec
from tfgpu.data.examples import Examples
running, most, begun, lock = 0, 0, 0, threading.Lock()
def wait(n):
    global running, most, begun
    with lock:
        running, begun = running + 1, begun + 1
        most = max(most, running)
    time.sleep(0.05)
    with lock:
        running -= 1
    return np.float32([n])
def read(place):
    return tf.ensure_shape(tf.numpy_function(wait, [place], tf.float32, stateful=False), [1])
examples = Examples("slow", np.arange(16) % 2, (1,), ("a", "b"), load=read)
counter = position.Counter()
order = lambda epoch: position.order(tf.range(16, dtype=tf.int64), seed=1, epoch=epoch)
spec = EpochSpec(examples, order, 16, 2, lambda e, p, x, y: x)
read = feed.batches(spec, counter.epochs(), feed.Feed(parallel_calls=4))
iterator = iter(read)
first = next(iterator)
until = time.monotonic() + 500
while (most < 2 or begun < 5) and time.monotonic() < until:
    time.sleep(0.05)
print(most, begun, counter.next)
"""


@pytest.mark.slow
def test_repeatable_operations_leave_the_input_parallel_and_ahead():
    """A stateful operation makes tf.data give up both for the whole dataset."""
    done = subprocess.run([sys.executable, "-c", REPEATABLE], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    most, begun, epochs = map(int, done.stdout.split()[-3:])
    assert most > 1 and begun > 4 and epochs == 1  # Two examples were asked for.
