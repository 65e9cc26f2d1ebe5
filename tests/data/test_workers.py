"""Two real processes under MultiWorkerMirroredStrategy get the batches of one device, or their own files."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tfgpu.data import pipeline, write_shards

WORKER = """
import pickle, sys
import keras, numpy as np, tensorflow as tf, tfgpu
from tfgpu.data import pipeline
strategy = tfgpu.strategy()
got = []
for global_batch in map(int, sys.argv[3:]):
    with strategy.scope():
        data = pipeline("digits", global_batch=global_batch, augment="auto", seed=4, validation=0.1, test=0.2)
    data.seek(2)
    for part in (data.train, data.test):
        for batch in strategy.experimental_distribute_dataset(part):
            got.append([[p.numpy() for p in strategy.experimental_local_results(t)] for t in batch])
keras.utils.set_random_seed(0)
with strategy.scope():
    parts = {"validation": 0.1, "test": 0.2}
    own = pipeline(sys.argv[2], global_batch=256, memory_bytes=0, sharding="file", augment="auto", **parts)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
labels = [
    np.concatenate([p.numpy() for p in strategy.experimental_local_results(y)])
    for _, y in strategy.experimental_distribute_dataset(own.train)
]
losses = model.fit(own.train, validation_data=own.validation, epochs=2, verbose=0).history["loss"]
steps = int(strategy.experimental_local_results(model.optimizer.iterations.value)[0])
with open(sys.argv[1], "wb") as file:
    pickle.dump((got, {"labels": labels, "losses": losses, "steps": steps, "info": own.info}), file)
"""


def run_workers(addresses, tmp_path, shards, *global_batches):
    processes, outputs = [], []
    try:
        for i in range(2):
            config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}})
            outputs.append(tmp_path / f"{i}.pickle")
            command = [sys.executable, "-c", WORKER, str(outputs[-1]), shards, *map(str, global_batches)]
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "TF_CONFIG": config},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads(path.read_bytes()) for path in outputs]


def check_files_of_their_own(own, other):
    whole = pipeline("digits", global_batch=256, validation=0.1, test=0.2)
    read = [np.concatenate(each["labels"]) for each in (own, other)]
    expected = np.concatenate([y for _, y in whole.train])
    assert np.bincount(np.concatenate(read)).tolist() == np.bincount(expected).tolist()
    assert own["info"] == other["info"] and own["info"].steps_per_epoch == len(own["labels"]) == len(other["labels"])
    assert own["info"].train_examples == whole.info.train_examples
    assert max(len(a) + len(b) for a, b in zip(own["labels"], other["labels"], strict=True)) <= 256
    assert own["losses"] == other["losses"] and own["losses"][1] < own["losses"][0], (own["losses"], other["losses"])
    assert own["steps"] == other["steps"] == 2 * own["info"].steps_per_epoch


@pytest.mark.slow
@pytest.mark.processes
def test_the_workers_parts_in_order_are_the_one_device_batches(tmp_path, addresses):
    sizes = (500, 419)  # 1258 = 500 + 500 + 258 = 3 * 419 + 1: the last batch has one example for two workers
    write_shards("digits", tmp_path / "shards", shards=6)
    (first, own), (second, other) = run_workers(addresses(2), tmp_path, str(tmp_path / "shards"), *sizes)
    check_files_of_their_own(own, other)
    expected = []
    for size in sizes:
        data = pipeline("digits", global_batch=size, augment="auto", seed=4, validation=0.1, test=0.2)
        data.seek(2)
        expected += [batch for part in (data.train, data.test) for batch in part]
    assert len(expected[-2][1]) == 1 or len(expected[6][1]) == 1
    assert len(first) == len(second) == len(expected)
    for (x, y), one, two in zip(expected, first, second, strict=True):
        assert abs(len(one[1][0]) - len(two[1][0])) <= 1
        np.testing.assert_array_equal(x, np.concatenate([*one[0], *two[0]]))
        np.testing.assert_array_equal(y, np.concatenate([*one[1], *two[1]]))
