"""TensorFlow warns about repeated retracing: ordinary use of Keras must not cause it."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfgpu

SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf, tfgpu
tfgpu.repair_keras()
tfgpu.environment.set_logical_devices(2)
x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")

def model(**how):
    with tfgpu.strategy(sys.argv[1], devices=2).scope():
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        if sys.argv[2] == "sharded":
            tfgpu.parallel.shard(made)
        made.compile("adam", "mse", metrics=["mae"], **how)
    return made

if sys.argv[2] == "models":
    for _ in range(7):
        one = model()
        one.fit(x, y, batch_size=40, verbose=0)
        one.evaluate(x, y, batch_size=40, verbose=0)
elif sys.argv[2] == "loops":
    one = model()
    for rows in range(20, 32):
        one.evaluate(x[:rows], y[:rows], batch_size=7, verbose=0)
        one.predict(x[:rows], batch_size=7, verbose=0)
elif sys.argv[2] == "batches":
    one = model()
    for rows in (8, 7, 6, 8, 7, 6):
        one.train_on_batch(x[:rows], y[:rows])
        one.test_on_batch(x[:rows], y[:rows])
elif sys.argv[2] == "checkpoints":
    for number in range(6):
        callbacks = [tfgpu.callbacks.Checkpoint(f"{number}"), tfgpu.callbacks.SkipNaN()]
        model().fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
elif sys.argv[2] == "sharded":
    for _ in range(6):
        model().fit(x, y, batch_size=8, verbose=0)
elif sys.argv[2] == "xla":
    for _ in range(6):
        model(jit_compile=True).fit(x, y, batch_size=8, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy, what",
    [
        ("mirrored", "models"),
        ("mirrored", "loops"),
        ("mirrored", "batches"),
        pytest.param("mirrored", "checkpoints", marks=pytest.mark.slow),
        pytest.param("mirrored", "sharded", marks=pytest.mark.slow),
        pytest.param("mirrored", "xla", marks=pytest.mark.slow),
        pytest.param("averaging", "models", marks=pytest.mark.slow),
        pytest.param("averaging", "loops", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_retraced(tmp_path, strategy, what):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", SCRIPT, strategy, what]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "triggered tf.function retracing" not in ran.stderr


@pytest.mark.slow
def test_data_of_several_shapes_is_sharded_under_one_strategy():
    """The function that deals batches is the strategy's; it must not become one for tensors of no rank."""
    strategy = tfgpu.strategy("mirrored", devices=2)
    for wanted in ((4,), (5,), (2, 2, 2), (2, 3), (4,)):
        with strategy.scope():
            model = keras.Sequential([keras.Input(wanted), keras.layers.Flatten(), keras.layers.Dense(1)])
        for rows in (7, 4, 9):
            x = np.random.default_rng(rows).normal(size=(rows, *wanted)).astype("float32")
            found = model.predict(x, batch_size=4, verbose=0)
            np.testing.assert_allclose(found, model(x).numpy(), rtol=1e-5, atol=1e-6)
