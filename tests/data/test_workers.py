"""Two real processes under MultiWorkerMirroredStrategy get the batches of one device."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tfgpu.data import load

WORKER = """
import pickle, sys
import tfgpu
from tfgpu.data import load
strategy = tfgpu.strategy()
got = []
for global_batch in map(int, sys.argv[2:]):
    with strategy.scope():
        data = load("digits", global_batch=global_batch, augment="auto", seed=4, validation=0.1, test=0.2)
    data.seek(2)
    for part in (data.train, data.test):
        for batch in strategy.experimental_distribute_dataset(part):
            got.append([[p.numpy() for p in strategy.experimental_local_results(t)] for t in batch])
with open(sys.argv[1], "wb") as file:
    pickle.dump(got, file)
"""


def run_workers(addresses, tmp_path, *global_batches):
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
            _, errors = process.communicate(timeout=550)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads(path.read_bytes()) for path in outputs]


@pytest.mark.slow
@pytest.mark.processes
def test_the_workers_parts_in_order_are_the_one_device_batches(tmp_path, addresses):
    sizes = (500, 419)  # 1258 = 500 + 500 + 258 = 3 * 419 + 1: the last batch has one example for two workers
    first, second = run_workers(addresses(2), tmp_path, *sizes)
    expected = []
    for size in sizes:
        data = load("digits", global_batch=size, augment="auto", seed=4, validation=0.1, test=0.2)
        data.seek(2)
        expected += [batch for part in (data.train, data.test) for batch in part]
    assert len(expected[-2][1]) == 1 or len(expected[6][1]) == 1
    assert len(first) == len(second) == len(expected)
    for (x, y), one, two in zip(expected, first, second, strict=True):
        assert abs(len(one[1][0]) - len(two[1][0])) <= 1
        np.testing.assert_array_equal(x, np.concatenate([*one[0], *two[0]]))
        np.testing.assert_array_equal(y, np.concatenate([*one[1], *two[1]]))


TRAINING = """
import collections, hashlib, json, sys
import keras, numpy as np, tensorflow as tf, tfgpu
from tfgpu.data import load
from tfgpu.data.examples import Examples

loads = collections.Counter()


def read(index):
    def one(i):
        loads[int(i)] += 1
        return np.random.default_rng(i).integers(0, 256, [6, 6, 3], dtype=np.uint8)

    return tf.ensure_shape(tf.numpy_function(one, [index], tf.uint8), [6, 6, 3])


strategy = tfgpu.strategy(sys.argv[1])
keras.utils.set_random_seed(0)
own = {"train": np.arange(70), "validation": np.arange(70, 93)}
source = Examples("counted", np.arange(93) % 3, (6, 6, 3), ("a", "b", "c"), load=read, own=own)
data = load(source, global_batch=16, augment=sys.argv[2:], seed=5, test=0, prefetch=1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6, 6, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
    kind = "CategoricalCrossentropy" if data.info.labels == "one_hot" else "SparseCategoricalCrossentropy"
    model.compile(keras.optimizers.SGD(0.05), getattr(keras.losses, kind)(from_logits=True))
logs = model.fit(data.train, validation_data=data.validation, epochs=3, verbose=0, shuffle=False).history
weights = [np.asarray(w).tolist() for w in model.get_weights()]
print(json.dumps({"weights": weights, "logs": logs, "loads": loads.total()}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stages", [["flip", "noise"], ["mixup", "cutmix"]])
def test_two_workers_learn_what_one_device_learns_and_each_reads_its_share(together, stages):
    alone = together(TRAINING, {"worker": 1}, "one_device", *stages)["worker0"]
    both = together(TRAINING, {"worker": 2}, "multi_worker", *stages)
    assert both["worker0"]["weights"] == both["worker1"]["weights"]
    for one, two in zip(alone["weights"], both["worker0"]["weights"], strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    for name, values in alone["logs"].items():
        np.testing.assert_allclose(values, both["worker1"]["logs"][name], rtol=1e-5)
    whole = alone["loads"]
    assert whole == 3 * 93
    for worker in both.values():  # and the first batch, which is compared whole
        share = (worker["loads"] - 16) / (whole / 2)
        assert share == pytest.approx(1.0, abs=0.03) if "mixup" not in stages else 1.3 < share < 2.0
