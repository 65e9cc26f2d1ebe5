"""A run resumes anywhere in an epoch, and reads nothing of the batches before."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import worker_rows
from tfgpu.data import bucket, load, mixture
from tfgpu.data.examples import Examples
from tfgpu.errors import InputError

ROWS, BATCH = 30, 4  # 8 batches, the last of 2


class Counted:
    """Pictures that are read on demand, and how often."""

    def __init__(self):
        self.reads = 0
        self.pictures = np.random.default_rng(0).random((ROWS, 6, 6, 1)).astype("float32")

    def examples(self):
        def read(index):
            self.reads += 1
            return self.pictures[index]

        def load_one(index):
            found = tf.numpy_function(read, [index], tf.float32, stateful=False)
            return tf.ensure_shape(found, [6, 6, 1])

        where = lambda index: tf.strings.as_string(index)  # noqa: E731
        own = {"train": np.arange(ROWS)}
        return Examples("counted", np.arange(ROWS) % 3, (6, 6, 1), ("a", "b", "c"), load=load_one, where=where, own=own)


def made(source, **settings):
    return load(source, **{"global_batch": BATCH, "seed": 2, **settings})


def batches(data):
    return [tf.nest.map_structure(np.asarray, batch) for batch in data.train.as_numpy_iterator()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


X, Y = np.random.default_rng(1).random((ROWS, 6, 6, 1)).astype("float32"), np.arange(ROWS) % 3
SOURCES = {
    "arrays": (lambda: (X, Y), {"augment": ["flip", "noise"]}),
    "files": (lambda: Counted().examples(), {"augment": ["flip", "noise"]}),
    "mixup of files": (lambda: Counted().examples(), {"augment": ["mixup"]}),
    "named": (lambda: ({"a": X}, {"b": Y}), {}),
    "mixture": (lambda: mixture([((X, Y), 1), ((-X, Y), 2)]), {}),
}


@pytest.mark.sample("named")
@pytest.mark.parametrize("name", SOURCES)
def test_an_iteration_begins_with_any_batch(name):
    source, settings = SOURCES[name]
    data = made(source(), **settings)
    data.seek(2)
    whole, after = batches(data), batches(data)
    for step in (1, len(whole) - 1, len(whole)):
        data.seek(2, step)
        assert data.train.cardinality() == len(whole)
        assert_same(batches(data), whole[step:])
        assert_same(batches(data), after)  # from its first batch
    data.seek(2, 3)
    tf.nest.map_structure(np.testing.assert_array_equal, data.peek(), whole[3])
    assert_same(batches(data), whole[3:])


@pytest.mark.sample("arrays")
@pytest.mark.parametrize("name", ["arrays", "mixup of files"])
def test_a_worker_s_rows_begin_there_too(name):
    source, settings = SOURCES[name]
    data = made(source(), **settings)
    part = worker_rows.of(data.train).make(worker_rows.Ranges((1,), 2))
    data.seek(1)
    whole = [*part.as_numpy_iterator()]
    data.seek(1, 5)
    assert_same([*part.as_numpy_iterator()], whole[5:])


@pytest.mark.parametrize("step", [1, 7])
def test_nothing_before_is_read(step):
    source = Counted()
    data = made(source.examples(), prefetch=0, parallel_calls=1)
    source.reads = 0
    data.seek(0, step)
    assert len(batches(data)) == 8 - step
    assert source.reads == ROWS - step * BATCH


@pytest.mark.sample("1")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_fit_reads_only_what_is_left(tmp_path, devices, stops_after):
    """Two epochs of 8 batches; the first run ends after batch 14, saved after 13: 6 rows of two batches are left."""

    def build():
        keras.utils.set_random_seed(0)
        names = [f"CPU:{at}" for at in range(devices)]
        with tfgpu.strategy("mirrored" if devices > 1 else "one_device", devices=names).scope():
            model = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    straight = build()
    straight.fit(made(Counted().examples()).train, epochs=2, verbose=0)
    saves = lambda: tfgpu.callbacks.Checkpoint(tmp_path / "run", every_steps=13)  # noqa: E731
    with pytest.raises(InterruptedError):
        build().fit(made(Counted().examples()).train, epochs=2, verbose=0, callbacks=[saves(), stops_after(14)])
    source = Counted()
    data, resumed = made(source.examples(), prefetch=0, parallel_calls=1), build()
    source.reads = 0
    resumed.fit(data.train, epochs=2, verbose=0, callbacks=[saves()])
    for mine, other in zip(resumed.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    assert source.reads <= ROWS - 5 * BATCH + 2 * BATCH  # and what building the model looks at


def test_sequences_begin_there_too():
    sequences = [np.arange(1, 2 + n % 5) for n in range(20)]
    data = bucket(sequences, np.arange(20) % 2, boundaries=[3, 5], global_batch=4, seed=1)
    data.seek(1)
    whole = batches(data)
    data.seek(1, 2)
    assert_same(batches(data), whole[2:])


def test_wrong_steps_name_the_fix():
    data = made((X, Y))
    for step in (-1, 1.5, True):
        with pytest.raises(InputError, match="`step` must be a whole number of at least 0"):
            data.seek(0, step)
