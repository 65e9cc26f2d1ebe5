import csv

import keras
import numpy as np
import pytest

from tfgpu.callbacks.metrics_file import MetricsFile


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def fit(callbacks, **settings):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model.fit(np.zeros((8, 2)), np.zeros(8), batch_size=2, verbose=0, callbacks=callbacks, **settings)


def test_one_row_per_epoch_with_stable_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    history = fit([MetricsFile(path)], epochs=3, validation_split=0.25)
    rows = read(path)
    assert list(rows[0]) == ["epoch", "loss", "val_loss", "learning_rate", "step_time_s", "epoch_time_s"]
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert {row["learning_rate"] for row in rows} == {"0.5"}
    assert [float(row["loss"]) for row in rows] == history.history["loss"]
    assert all(0 < float(row["step_time_s"]) < float(row["epoch_time_s"]) for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_appends_to_the_earlier_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    earlier = [{"loss": 2.0, "learning_rate": 0.5, "step_time_s": 0.1, "epoch_time_s": 1.0}]
    fit([MetricsFile(path, rows=earlier)], epochs=3, initial_epoch=1)
    assert [(row["epoch"], row["loss"]) for row in read(path)] == [("1", "2.0"), ("2", "0.0"), ("3", "0.0")]


def test_a_block_of_steps_counts_as_that_many(tmp_path):
    metrics = MetricsFile(None)
    metrics.on_epoch_begin(0)
    metrics.on_train_batch_begin(0)
    metrics.on_train_batch_end(49)
    assert len(metrics._step_times) == 50
    assert sum(metrics._step_times) == pytest.approx(metrics._last_end - metrics._begun)


def test_later_callbacks_see_the_times(tmp_path):
    seen = {}
    last = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))
    history = fit([MetricsFile(None), last], epochs=1)
    assert seen.keys() >= {"loss", "learning_rate", "step_time_s", "epoch_time_s"}
    assert "step_time_s" in history.history
