"""XLA in KerasHub's models over several devices: the calls are compiled, and the result is one device's under XLA."""

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensor_families as families

import tfgpu
from tfgpu.parallel import Mesh, apply

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub")
BOUNDS = {"float32": 1e-5, "mixed_bfloat16": 3e-4}
LAYOUTS = {"tensor 2": ({"tensor": 2}, {}), "ZeRO 3": ({"data": 2}, {"zero": 3})}
CASES = [
    ("llama3", "full", "tensor 2", "float32"),
    ("llama3", "LoRA", "ZeRO 3", "mixed_bfloat16"),
]


def trained(model, data, kind):
    x, y, weights = data
    with model.distribute_strategy.scope():
        # A gradient that is 0 but for rounding would become a step of any size below this epsilon.
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **families.CLIP[kind])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=True)
    how = {"batch_size": families.BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, **how).history


@pytest.mark.parametrize(("family", "kind", "layout", "policy"), CASES, ids=[", ".join(case) for case in CASES])
def test_the_training_is_one_devices_under_xla(family, kind, layout, policy, caplog):
    sizes, more = LAYOUTS[layout]
    keras.config.set_dtype_policy(policy)
    try:
        with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
            one, data = families.made(family, kind)
        expected = trained(one, data, kind)
        mesh = Mesh(**sizes, devices=["CPU:0", "CPU:1"])
        with contextlib.redirect_stdout(sys.stderr):  # the table of what is split
            model = apply(families.made(family, kind)[0], mesh, **more)
        history = trained(model, data, kind)
    finally:
        keras.config.set_dtype_policy("float32")
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=BOUNDS[policy])
    assert families.weights_apart(one, model) < BOUNDS[policy]
    assert not [record for record in caplog.records if "cannot be traced" in record.getMessage()]
