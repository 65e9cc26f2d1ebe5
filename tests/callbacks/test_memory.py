import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Memory, MetricsFile
from tfgpu.callbacks.memory import peaks
from tfgpu.callbacks.progress import line
from tfgpu.core.step_blocks import needs_every_batch


def test_the_peak_includes_freed_memory():
    held = np.ones(2**24)
    resident = psutil.Process().memory_info().rss
    del held
    assert peaks()["host_peak_bytes"] > 0.99 * resident > 2**27  # the kernel counts in batches of pages


@pytest.mark.slow
def test_a_small_child_of_a_large_process_counts_only_itself():
    held = np.ones(2**27)  # 1 GiB
    script = "from tfgpu.callbacks.memory import peaks; print(peaks()['host_peak_bytes'])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=550, check=True)
    assert 2**27 < int(told.stdout) < held.nbytes


def test_every_epoch_has_it_in_the_logs_and_the_table(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [Memory(), MetricsFile(tmp_path / "metrics.csv")]
    history = model.fit(np.ones((8, 2)), np.ones(8), epochs=2, callbacks=callbacks, verbose=0).history
    assert 2**20 < history["host_peak_bytes"][0] <= history["host_peak_bytes"][1] <= peaks()["host_peak_bytes"]
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header == "epoch,loss,learning_rate,step_time_s,epoch_time_s,host_peak_bytes"
    assert not needs_every_batch(Memory())


def test_it_is_shown_in_gib():
    assert line({"loss": 0.5, "host_peak_bytes": 3 * 2**29, "gpu1_peak_bytes": 2**28}) == (
        "loss 0.5000  host 1.50 GiB  gpu1 0.25 GiB"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="no GPU")
def test_a_gpu_s_peak_is_the_epoch_s_own():
    sizes = iter([2**24, 2**20])
    hold = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: tf.ones([next(sizes)]))
    with tfgpu.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    logs = model.fit(np.ones((8, 2)), np.ones(8), epochs=2, callbacks=[Memory(), hold], verbose=0).history
    assert logs["gpu0_peak_bytes"][0] > 2**26 > logs["gpu0_peak_bytes"][1] > 0
