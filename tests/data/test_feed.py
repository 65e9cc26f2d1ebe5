import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import strategies
from tfgpu.data import feed, load, position
from tfgpu.data.epoch import EpochSpec
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


def test_examples_stay_in_order_whenever_they_are_ready():
    ordered = list(feed_of(slow(12), feed.Feed(parallel_calls=4)))
    assert np.concatenate([x.numpy()[:, 0] for x, _ in ordered]).tolist() == list(range(12))
    assert [int(place) for _, place in ordered] == [0, 4, 8]


@pytest.mark.parametrize("settings", [{"prefetch": 0, "parallel_calls": 1}, {"prefetch": 3}])
def test_no_setting_changes_the_batches(settings):
    data = load(numbered(30), global_batch=7, seed=5, validation=0, test=0, **settings)
    for epoch in range(2):
        indices = tf.range(30, dtype=tf.int64)
        expected = position.order(indices, seed=5, epoch=tf.constant(epoch, tf.int64))
        assert numbers(data.train) == expected.numpy().tolist()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"parallel_calls": 0}, "`parallel_calls` must be a whole number of at least 1"),
        ({"prefetch": -1}, "`prefetch` must be a whole number of at least 0"),
    ],
)
def test_an_invalid_setting_names_the_fix(settings, message):
    with pytest.raises(InputError, match=message):
        load(numbered(30), global_batch=7, **settings)


REPEATABLE = """
import threading, time
import numpy as np, tensorflow as tf
tf.config.experimental.enable_op_determinism()
from tfgpu.data import feed, position
from tfgpu.data.epoch import EpochSpec
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
del iterator  # with the interpreter's end, it would wait for ever for Python calls that have no interpreter
print(most, begun, counter.next)
"""


def test_fit_does_not_warn_that_the_data_is_not_shuffled():
    data = load(numbered(8), global_batch=4)
    with strategies.one_device().scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*shuffle=True.*")
        model.fit(data.train, epochs=1, verbose=0)


@pytest.mark.slow
def test_repeatable_operations_leave_the_input_parallel_and_ahead():
    """A stateful operation makes tf.data give up both for the whole dataset."""
    done = subprocess.run([sys.executable, "-c", REPEATABLE], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    most, begun, epochs = map(int, done.stdout.split()[-3:])
    assert most > 1 and begun > 4 and epochs == 1  # Two examples were asked for.
