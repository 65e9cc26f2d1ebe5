"""The sharded optimizer over real processes: each worker holds its own pieces, and the files are one device's."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import json, os, sys, tempfile
import keras, numpy as np, safetensors.numpy, tensorflow as tf
import tfgpu
from tfgpu.core.state import sharded_variable

path, devices, cases = sys.argv[1], int(sys.argv[2]), CASES
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
strategy = tfgpu.strategy("multi_worker", devices=[f"CPU:{at}" for at in range(devices)], all_reduce=sys.argv[3])
count = strategy.num_replicas_in_sync
rng = np.random.default_rng(0)
x, y = rng.integers(0, 11, (50, 6)), rng.normal(size=(50, 1)).astype("float32")

def make(where, stage, policy="float32", kind="AdamW", **options):
    keras.utils.set_random_seed(1)
    with where.scope():
        inputs = keras.Input((6,), dtype="int32")
        values = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 5)(inputs))
        hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(7, "relu", dtype=policy)(values))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        if stage:
            model = tfgpu.parallel.shard(model, stage)
        optimizer = getattr(keras.optimizers, kind)(0.01, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=6)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model

def fit(model, epochs, *callbacks):
    return model.fit(x, y, 16, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]

def apart(mine, others):
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(mine, others, strict=True))

found = {}
for name, case in cases.items():
    stage = case.pop("stage")
    one, folder = make(tf.distribute.get_strategy(), 0, **case), f"{path}/{name}"
    expected = fit(one, 5)
    fit(make(strategy, stage, **case), 3, tfgpu.callbacks.Checkpoint(folder))
    many = make(strategy, stage, **case)  # resumes from the checkpoint
    losses = fit(many, 5, tfgpu.callbacks.Checkpoint(folder))
    file = f"{path}/{name}.keras" if strategy.extended.should_checkpoint else f"{tempfile.mkdtemp()}/{name}.keras"
    many.save(file)
    wholes = [v.numpy() for v in sharded_variable.merged(many.optimizer.variables)]
    own = [v for v in many.optimizer.variables if "velocity" in v.path]
    weights = many.get_weights()  # in pieces, all workers must ask
    arrays = {v.path: np.array(v.numpy()) for v in one.weights}
    own_file = f"{tempfile.mkdtemp()}/own.safetensors"
    safetensors.numpy.save_file(arrays, own_file)
    read = make(strategy, stage, **case)
    paths = [v.path for v in sharded_variable.merged(read.weights)]
    tfgpu.parallel.load_weights(read, own_file, names=dict(zip(paths, arrays, strict=True)))
    found[name] = {
        "weights": apart(weights, one.get_weights()),
        "read": apart(read.get_weights(), one.get_weights()),
        "losses": apart(losses, expected),
        "predictions": apart(many.predict(x, verbose=0), one.predict(x, verbose=0)),
        "slots": apart(wholes, [v.numpy() for v in one.optimizer.variables]),
        "sizes": [[copy.shape[0] for copy in v.value.values] for v in own],
        "expected": [[-(-int(np.prod(v.shape)) // count)] * devices for v in one.trainable_variables],
    }
    if "kind" in case:  # another number of replicas holds each
        found[name]["sizes"] = found[name]["expected"] = []
    if strategy.extended.should_checkpoint:
        loaded = keras.models.load_model(file)
        found[name]["file"] = apart([v.numpy() for v in loaded.optimizer.variables], wholes)
        found[name]["opened"] = apart(loaded.get_weights(), weights)
print(json.dumps(found))
"""
CASES = {
    "stage1": {"stage": 1, "clipnorm": 0.1},
    "stage2": {"stage": 2, "global_clipnorm": 0.1, "use_ema": True},
    "waiting": {"stage": 2, "gradient_accumulation_steps": 3, "global_clipnorm": 0.1},
    "float16": {"stage": 2, "policy": "mixed_float16"},
    "bfloat16": {"stage": 3, "policy": "mixed_bfloat16"},
    "stage3": {"stage": 3, "global_clipnorm": 0.1, "use_ema": True},
    "stage3 waiting": {"stage": 3, "gradient_accumulation_steps": 3, "clipnorm": 0.1},
}
WHOLE = {
    "muon": {"stage": 2, "kind": "Muon", "global_clipnorm": 0.1, "use_ema": True},
    "lamb waiting": {"stage": 1, "kind": "Lamb", "gradient_accumulation_steps": 3, "clipnorm": 0.1},
    "adafactor": {"stage": 3, "kind": "Adafactor", "global_clipnorm": 0.1},
}


@pytest.mark.parametrize(("devices", "all_reduce"), [(1, "auto"), (2, "auto"), (2, "hierarchical")])
def test_workers_learn_what_one_device_learns(together, tmp_path, devices, all_reduce):
    cases = CASES if devices == 1 else {name: CASES[name] for name in ("stage2", "waiting", "stage3")}
    answers = together(SCRIPT.replace("CASES", repr(cases)), {"worker": 2}, tmp_path, devices, all_reduce, timeout=800)
    assert len(answers) == 2
    for answer in answers.values():
        for name, found in answer.items():
            tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(name, 1e-5)
            assert found.pop("sizes") == found.pop("expected"), name
            assert {key: value for key, value in found.items() if not value <= tolerance} == {}, name


@pytest.mark.parametrize("devices", [1, 2])
def test_variables_are_dealt_to_owners_on_all_workers(together, tmp_path, devices):
    answers = together(SCRIPT.replace("CASES", repr(WHOLE)), {"worker": 2}, tmp_path, devices, "auto", timeout=800)
    for answer in answers.values():
        for name, found in answer.items():
            assert found.pop("sizes") == found.pop("expected") == []
            assert {
                key: value for key, value in found.items() if not value <= 1e-6 * (10 if key == "losses" else 1)
            } == {}, name
