"""A run that is interrupted anywhere and resumed ends like an uninterrupted one: weights, metrics, draws."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfgpu

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
STEPS = 5  # of 4 rows


class Reads(keras.utils.PyDataset):
    """Rows that are reshuffled at each epoch's end, with a seed."""

    def __init__(self):
        super().__init__()
        self.rng, self.order = np.random.default_rng(3), np.arange(20)

    def __len__(self):
        return STEPS

    def __getitem__(self, at):
        rows = self.order[at * 4 : at * 4 + 4]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


FEEDS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4, "shuffle": False},
    "arrays shuffled": lambda: {"x": X, "y": Y, "batch_size": 4},
    "dataset shuffled": lambda: {"x": rows().shuffle(20, seed=5).batch(4)},
    "unknown length": lambda: {"x": rows().filter(lambda x, y: True).batch(4)},
    "repeated": lambda: {"x": rows().batch(4).repeat(), "steps_per_epoch": 3},
    "pydataset": lambda: {"x": Reads()},
}


def make(strategy):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), L.Dense(8, "relu"), L.Dropout(0.3), L.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


def run(strategy, feed, *, backup=None, stops=None, by_trainer=False):
    model = make(strategy)
    callbacks = ([backup] if backup else []) + ([stops] if stops else [])
    fit = tfgpu.Trainer(model).fit if by_trainer else model.fit
    try:
        return model, fit(**feed(), epochs=3, callbacks=callbacks, verbose=0).history
    except InterruptedError:
        return model, None


def strategy_of(devices):
    tfgpu.repair_keras()
    if devices == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def same(model, history, whole, never_stopped):
    for a, b in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, values in history.items():
        assert values == pytest.approx(never_stopped[name][-len(values) :], abs=1e-5), name


WAYS = [(name, 1, False) for name in FEEDS] + [("arrays", 2, False), ("repeated", 2, True), ("arrays", 1, True)]


FAST = [("arrays", 1, False), ("arrays", 2, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed", "devices", "by_trainer"),
    [pytest.param(*way, marks=[] if way in FAST else pytest.mark.slow) for way in WAYS],
)
def test_resumes_in_the_second_epoch(tmp_path, feed, devices, by_trainer, stops_after):
    strategy, feed = strategy_of(devices), FEEDS[feed]
    whole = run(strategy, feed, by_trainer=by_trainer)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, save_freq=2)

    run(
        strategy,
        feed,
        backup=backup(),
        stops=stops_after(5 if "steps_per_epoch" in feed() else 8),
        by_trainer=by_trainer,
    )
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 1
    model, history = run(strategy, feed, backup=backup(), by_trainer=by_trainer)
    assert len(history["loss"]) == 2
    same(model, history, *whole)
    assert not tmp_path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_run_that_stopped_after_an_epochs_last_batch_has_its_metrics(tmp_path, by_trainer, stops_after):
    strategy, feed = strategy_of(1), FEEDS["arrays"]
    whole = run(strategy, feed)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, save_freq=STEPS)

    run(strategy, feed, backup=backup(), stops=stops_after(STEPS), by_trainer=by_trainer)
    model, history = run(strategy, feed, backup=backup(), by_trainer=by_trainer)
    assert len(history["loss"]) == 3
    same(model, history, *whole)


@pytest.mark.slow
def test_a_second_interruption_and_the_next_fit(tmp_path, stops_after):
    strategy, feed = strategy_of(1), FEEDS["arrays"]
    whole = run(strategy, feed)
    for after in (8, 4):  # in the second epoch, and four batches after its second: in the third
        run(strategy, feed, backup=keras.callbacks.BackupAndRestore(tmp_path, save_freq=1), stops=stops_after(after))
    model, history = run(strategy, feed, backup=keras.callbacks.BackupAndRestore(tmp_path, save_freq=1))
    assert len(history["loss"]) == 1
    same(model, history, *whole)
    assert len(model.fit(**feed(), epochs=2, verbose=0).history["loss"]) == 2  # stock Keras would skip both


def test_a_backup_of_stock_keras_is_restored_as_stock_keras_does(tmp_path):
    model = make(strategy_of(1))
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "latest.weights.h5")
    (tmp_path / "training_metadata.json").write_text('{"epoch": 2, "batch": 0}')
    history = run(strategy_of(1), FEEDS["arrays"], backup=keras.callbacks.BackupAndRestore(tmp_path))[1]
    assert len(history["loss"]) == 1
