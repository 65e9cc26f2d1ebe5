"""What the tests of Spark share: sessions, a table and a training on it, and a look at what is left of them."""

import contextlib
import functools
import os
import shutil
import sys
import time

import numpy as np
import psutil
import pytest

ROWS = 49
MARK = "TFGPU_TEST"
MINE = {MARK: f"tfgpu-test-{os.getpid()}"}


def pyspark():
    """The module, ready to send what stands here to its executors; skips where Spark or Java is not installed."""
    found = pytest.importorskip("pyspark", reason="needs Spark: pip install 'tfgpu[spark]'")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs Java: apt-get install openjdk-17-jre-headless")
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return found


@contextlib.contextmanager
def session(master: str):
    """A session of its own at `master`: Spark would hand out one that is open already, whatever its master."""
    from pyspark.sql import SparkSession

    assert SparkSession.getActiveSession() is None
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "localhost").config("spark.driver.memory", "512m")
    builder = builder.config("spark.executor.memory", "512m")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        assert spark.sparkContext.master == master
        yield spark
    finally:
        spark.stop()


def table():
    draw = np.random.default_rng(0)
    return draw.normal(size=(ROWS, 3))


def frame(spark):
    rows = [(float(a), [float(b), float(c)], float(a + b + c)) for a, b, c in table()]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 5), "a double, b array<double>, y double")


def model_of(strategy):
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(data, folder, epochs=3, seed=None, pause_s=0.0):
    import keras

    import tfgpu

    strategy = tfgpu.strategy()
    model = model_of(strategy)
    # This process's supervisor and the guard of that stand between it and the task.
    engine = psutil.Process().parents()[2].pid
    facts = {"engine": engine, "process": os.getpid(), "attempt": os.environ["TFGPU_ATTEMPT"]}
    callbacks = [
        tfgpu.callbacks.Checkpoint(folder, every_steps=2),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: tfgpu.launch.report(facts)),
        tfgpu.callbacks.Report(),
    ]
    if pause_s:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(pause_s)))
    batches = data.batches(["a", "b"], "y", strategy=strategy, seed=seed)
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
    return history.history, model.get_weights(), data.steps


@functools.cache
def one_device():
    """What one device makes of the rows in their order."""
    import tensorflow as tf

    import tfgpu

    model = model_of(tfgpu.strategy("one_device"))
    rows = table().astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((rows, table().sum(axis=1).astype("float32"))).batch(16)
    return model.fit(batches, epochs=3, verbose=0).history, model.get_weights()


def run(spark, folder, *arguments, workers=2, **options):
    """`train` on the table by `spark_job`, with time to start on a machine that does other work too."""
    import tfgpu

    given = {"global_batch": 16, "startup_timeout_s": 300, "environment": MINE, **options}
    return tfgpu.launch.spark_job(train, frame(spark), workers, arguments=(str(folder), *arguments), **given)


def check(found):
    """Compares weights and history with one device's."""
    history, weights, steps = found
    expected_history, expected = one_device()
    assert steps == 4
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for mine, one in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, one, atol=1e-5)


def marked() -> list[psutil.Process]:
    """The processes that have `MINE` in their environment: those that train."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended
            if process.environ().get(MARK) == MINE[MARK]:
                found.append(process)
    return found


def check_nothing_is_left(seconds: float = 60) -> float:
    """Waits until no process trains any more; returns the seconds that took."""
    began = time.monotonic()
    while left := marked():
        assert time.monotonic() < began + seconds, left
        time.sleep(0.2)
    return time.monotonic() - began
