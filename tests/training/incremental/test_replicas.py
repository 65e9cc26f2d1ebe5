"""Every method with replicas equals one device, after 20 steps and more."""

from pathlib import Path

import keras
import numpy as np
import pytest
import second_task
import tensorflow as tf

import tfgpu
from tfgpu.parallel.zero import sharded_optimizer
from tfgpu.training import incremental

CASES = {
    "clipped, weighted, uneven": {},
    "accumulation": {
        "optimizer": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5, gradient_accumulation_steps=2)
    },
    "averages": {
        "optimizer": lambda: keras.optimizers.SGD(
            0.05, momentum=0.9, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5
        )
    },
    "float16": {"policy": "mixed_float16", "optimizer": lambda: keras.optimizers.SGD(0.01)},
}
CLOSE = {"float16": 1e-4}  # as far as the same run without any of the methods


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:0")


def check(case, methods=second_task.METHODS, **options):
    options |= CASES[case]
    weights, logs = second_task.train(one_device(), methods, **options)
    found, told = second_task.train(tfgpu.strategy("mirrored", devices=2), methods, **options)
    assert second_task.difference(weights, found) <= CLOSE.get(case, 1e-6)
    for name, values in logs.items():
        assert told[name] == pytest.approx(values, abs=CLOSE.get(case, 2e-6)), name
    return weights


@pytest.mark.slow
def test_all_methods_at_once():
    check("clipped, weighted, uneven", first=0)  # of weights that are as they began


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_methods_at_once_and_what_goes_with_them(case):
    check(case)


@pytest.mark.slow
def test_each_method_alone_and_each_changes_something():
    alone = {method: check("clipped, weighted, uneven", (method,)) for method in second_task.METHODS}
    alone["none"] = second_task.train(one_device(), ())[0]
    names = list(alone)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            assert second_task.difference(alone[one], alone[other]) > 1e-4, (one, other)


WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tfgpu
from tfgpu.parallel.zero import sharded_optimizer
from tfgpu.training import incremental
strategy = tfgpu.strategy("multi_worker")
import second_task
weights, logs = second_task.train(strategy)
print(json.dumps({**logs, "weights": [w.tolist() for w in weights]}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_are_one_device(together):
    found = together(WORKER, {"worker": 2}, Path(__file__).parent, timeout=550)
    weights, logs = second_task.train(one_device())
    for each in found.values():
        assert second_task.difference(weights, [np.array(w, "float32") for w in each["weights"]]) <= 1e-6
        assert each["loss"] == pytest.approx(logs["loss"], abs=2e-6)
        assert each["distillation"] == pytest.approx(logs["distillation"], abs=2e-6)


def sgd():
    return keras.optimizers.SGD(0.05)


@pytest.mark.slow
def test_averaged_after_each_update_is_one_device():
    """Every method is part of the loss or the update, so local SGD needs no special support."""
    methods = ("distilled", "elastic", "replay", "rates")
    weights, _ = second_task.train(one_device(), methods, optimizer=sgd, layers="plain")
    strategy = tfgpu.strategy("averaging", devices=2, every=1)
    found, _ = second_task.train(strategy, methods, optimizer=sgd, layers="plain")
    assert second_task.difference(weights, found) <= 1e-6


SERVED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import keras, tfgpu
strategy = tfgpu.strategy("parameter_server")
import second_task
methods = ("distilled", "elastic", "replay", "rates", "frozen")
weights, logs = second_task.train(strategy, methods, optimizer=lambda: keras.optimizers.Adam(0.01), layers="plain")
print(json.dumps({**logs, "weights": [w.tolist() for w in weights]}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_one_worker_of_a_parameter_server_is_one_device(together):
    jobs = {"chief": 1, "worker": 1, "ps": 1}
    found = together(SERVED, jobs, Path(__file__).parent, wait_for="chief", timeout=550)["chief0"]

    def adam():
        return keras.optimizers.Adam(0.01)

    weights, logs = second_task.train(one_device(), optimizer=adam, layers="plain")
    assert second_task.difference(weights, [np.array(w, "float32") for w in found["weights"]]) <= 1e-6
    assert found["loss"] == pytest.approx(logs["loss"], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_with_a_sharded_optimizer_too(stage):
    def train(strategy, sharded):
        tfgpu.repair_keras()
        with strategy.scope():
            model = second_task.first_model(keras.optimizers.AdamW(0.01), layers="plain")
            optimizer = incremental.discriminative(keras.optimizers.AdamW(0.01, weight_decay=0.1), model, {"sec*": 0.3})
            model.compile(optimizer, model.loss)
        incremental.ElasticWeights(5.0).add(model, second_task.X, second_task.Y, examples=10)
        if sharded:
            sharded_optimizer.shard(model, stage=stage)
        model.fit(second_task.X, second_task.Y, batch_size=9, epochs=2, shuffle=False, verbose=0)
        return model

    model = train(tfgpu.strategy("mirrored", devices=2), True)
    one = train(one_device(), False)
    assert second_task.difference(one.get_weights(), model.get_weights()) <= 1e-6
    with pytest.raises(tfgpu.InputError, match="first, then shard|Grow first"):
        incremental.grow(model, 6)
