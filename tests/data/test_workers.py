"""Two real processes under MultiWorkerMirroredStrategy get the batches that one device gets."""

import json
import os
import pickle
import socket
import subprocess
import sys

import numpy as np
import pytest

from tfgpu.data import pipeline

WORKER = """
import pickle, sys
import tensorflow as tf
from tfgpu.data import pipeline
strategy = tf.distribute.MultiWorkerMirroredStrategy()
got = []
for global_batch in map(int, sys.argv[2:]):
    with strategy.scope():
        data = pipeline("digits", global_batch=global_batch, augment="auto", seed=4)
    data.seek(2)
    for part in (data.train, data.test):
        for batch in strategy.experimental_distribute_dataset(part):
            got.append([[p.numpy() for p in strategy.experimental_local_results(t)] for t in batch])
with open(sys.argv[1], "wb") as file:
    pickle.dump((strategy.num_replicas_in_sync, got), file)
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def run_workers(tmp_path, *global_batches):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes, outputs = [], []
    try:
        for i in range(2):
            config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}})
            outputs.append(tmp_path / f"{i}.pickle")
            command = [sys.executable, "-c", WORKER, str(outputs[-1]), *map(str, global_batches)]
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "TF_CONFIG": config},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads(path.read_bytes()) for path in outputs]


@pytest.mark.processes
def test_the_workers_parts_in_order_are_the_one_device_batches(tmp_path):
    sizes = (500, 419)  # 1258 = 500 + 500 + 258 = 3 * 419 + 1: the last batch has one example for two workers
    (replicas, first), (_, second) = run_workers(tmp_path, *sizes)
    assert replicas == 2
    expected = []
    for size in sizes:
        data = pipeline("digits", global_batch=size, augment="auto", seed=4)
        data.seek(2)
        expected += [batch for part in (data.train, data.test) for batch in part]
    assert len(expected[-2][1]) == 1 or len(expected[6][1]) == 1
    assert len(first) == len(second) == len(expected)
    for (x, y), one, two in zip(expected, first, second, strict=True):
        assert abs(len(one[1][0]) - len(two[1][0])) <= 1
        np.testing.assert_array_equal(x, np.concatenate([*one[0], *two[0]]))
        np.testing.assert_array_equal(y, np.concatenate([*one[1], *two[1]]))
