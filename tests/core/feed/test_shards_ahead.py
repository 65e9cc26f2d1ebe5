"""Shards that are read ahead to the GPUs of several replicas: the steps' own shards. `CPU:1` and on stand for GPUs."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import input_stats, iterator_end, step_blocks
from tfgpu.core.batch_sharding import ReplicaBatch
from tfgpu.core.feed import sharded_dataset, shards_ahead

ROWS = 26
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, ROWS)


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA = {
    "shuffled": lambda: {"x": slices().shuffle(ROWS, seed=3).batch(8)},
    "even": lambda: {"x": slices().batch(6, drop_remainder=True)},
    "uneven": lambda: {"x": slices().batch(8, drop_remainder=True)},
    "fewer rows than replicas": lambda: {"x": slices().batch(25)},
    "unknown length": lambda: {"x": slices().filter(lambda x, y: x[0] > -1).batch(8)},
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 6},
    "weights": lambda: {"x": X, "y": Y, "sample_weight": np.abs(X[:, 0]), "batch_size": 8},
}


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)])
def strategy(request):
    with gpu_way.gpu_way():
        yield tfgpu.strategy("mirrored", devices=[f"CPU:{number + 1}" for number in range(request.param)])


def trained(strategy, make, *, step=None):
    keras.utils.set_random_seed(0)
    data = make()
    with strategy.scope():
        inputs = keras.Input((4,))
        x = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(inputs)))
        made = (step or keras.Model)(inputs, keras.layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(True)
        made.compile("adam", loss, metrics=["accuracy"])
    history = made.fit(**data, epochs=2, verbose=0).history
    return [*made.get_weights(), np.array([*history.values()]), np.array(made.evaluate(**data, verbose=0))]


@pytest.fixture
def ahead(monkeypatch):
    """What was asked for, and whether it was read ahead."""
    found, can = [], shards_ahead.can_read_ahead
    monkeypatch.setattr(shards_ahead, "can_read_ahead", lambda *given: found.append(can(*given)) or found[-1])
    return found


@pytest.mark.sample("fewer rows than replicas")
@pytest.mark.parametrize("name", DATA)
def test_training_on_shards_that_are_read_ahead_is_the_same(name, strategy, ahead, monkeypatch):
    one = trained(strategy, DATA[name])
    assert ahead and all(ahead)
    monkeypatch.setattr(shards_ahead, "can_read_ahead", lambda *given: False)
    for value, expected in zip(one, trained(strategy, DATA[name]), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


class Own(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.slow
def test_a_step_of_one_s_own_may_see_the_whole_batch(strategy, ahead):
    trained(strategy, DATA["even"], step=Own)
    assert not ahead[0]


def test_batches_come_in_shards_on_their_devices(strategy):
    data = sharded_dataset.ShardedDataset(strategy, slices().batch(25), True)
    source = shards_ahead.dealer(strategy, data.dataset).iterator()
    count = strategy.num_replicas_in_sync
    assert len(iterator_end.resources(source)) == count + 1
    for rows in (25, 1):
        values = strategy.experimental_local_results(shards_ahead.next_shards(strategy, source))
        assert all(isinstance(each, ReplicaBatch) for each in values)
        assert sum(int(each.local) for each in values) == rows == int(values[0].total)
        assert [each.data[0].device[-5:] for each in values] == [f"CPU:{number + 1}" for number in range(count)]
    with pytest.raises(tf.errors.OutOfRangeError):
        shards_ahead.next_shards(strategy, source)


def test_a_last_batch_that_fails_is_an_error_and_no_end(strategy, ahead, tmp_path):
    names = [str(tmp_path / f"{number}.row") for number in range(5)]
    for name in names[:4]:
        X[0].tofile(name)

    def read(name):
        return tf.ensure_shape(tf.io.decode_raw(tf.io.read_file(name), tf.float32), [4]), tf.zeros([], tf.int64)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    with pytest.raises(tf.errors.NotFoundError, match="4.row"):
        model.fit(tf.data.Dataset.from_tensor_slices(names).map(read).batch(2), verbose=0)
    assert all(ahead) and int(model.optimizer.iterations.numpy()) == 2


def test_an_eager_step_reads_shards(strategy, ahead):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True), run_eagerly=True)
    model.fit(slices().batch(8), verbose=0)
    assert all(ahead) and int(model.optimizer.iterations.numpy()) == 4


@pytest.mark.slow
def test_the_wait_for_data_is_measured(strategy):
    class Waits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.found = input_stats.computing_s(step_blocks.current())

    waits = Waits()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(slices().batch(8), epochs=9, verbose=0, callbacks=[waits])
    assert waits.found > 0
