"""Bytes as integers, which a sum over workers leaves unchanged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.core.state import broadcast


@given(st.binary(max_size=50))
def test_bytes_come_back_from_words(content):
    words = broadcast.as_words(content)
    assert words.dtype == np.int64 and (words >= 0).all() and len(words) == -(-len(content) // 4)
    assert broadcast.from_words(words + np.zeros_like(words), len(content)) == content


SCRIPT = """
import json
import numpy as np, tensorflow as tf
import tfgpu
from tfgpu.core import collectives
from tfgpu.core.state import broadcast

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0", "CPU:1"])
rank = strategy.extended._id_in_cluster
arrays = [np.random.default_rng(each).normal(size=(2, 13)).astype("float32") for each in range(2)]
found = broadcast.of_all_workers(strategy, arrays[rank])
print(json.dumps({
    "sum": collectives.sum_over_workers(strategy, [10**rank, 2**33 + rank, 0]).tolist(),
    "chief": broadcast.bytes_from_chief(strategy, b"abcde" if rank == 0 else b"?").decode(),
    "all": found.tobytes() == np.stack(arrays).tobytes(),
}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_each_worker_counts_once_on_several_devices(together, tmp_path):
    answers = together(SCRIPT, {"worker": 2}, tmp_path, timeout=550)
    assert list(answers.values()) == [{"sum": [11, 2**34 + 1, 0], "chief": "abcde", "all": True}] * 2
