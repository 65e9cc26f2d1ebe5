import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.callbacks import Monitor
from tfgpu.sensors import table


@pytest.fixture(autouse=True)
def repaired():
    tfgpu.repair_keras()


def small(width=8):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(monitor, model=None, *, rows=60, epochs=2, **settings):
    model = model or small()
    x, y = np.ones((rows, 8), "float32"), np.ones((rows, 1), "float32")
    return model.fit(x, y, batch_size=7, epochs=epochs, verbose=0, callbacks=[monitor], **settings)


def test_a_table_of_samples_and_one_of_epochs(tmp_path):
    monitor = Monitor(tmp_path, every_s=0.05)
    fit(monitor, validation_split=0.1)
    epochs = table.read(tmp_path / "monitor-epochs-worker0.csv")
    assert [(row["epoch"], row["steps"], row["examples"]) for row in epochs] == [(1, 8, 54), (2, 8, 54)]
    assert [row["limit"] for row in epochs] == [row["limit"] for row in monitor.epochs]
    samples = table.read(tmp_path / "monitor-worker0.csv")
    assert samples[-1]["step"] == 16 and samples[-1]["memory_bytes"] > 2**26
    seconds = [row["seconds"] for row in samples]
    assert seconds == sorted(seconds)
    assert not any(name.startswith("gpu0") for name in samples[-1])
