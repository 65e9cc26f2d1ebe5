"""XLA in KerasHub's models over several devices: the calls are compiled, and the result is one device's under XLA."""

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensor_families as families

import tfgpu
from tfgpu.finetuning import graph
from tfgpu.parallel import Mesh, apply, recompute

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub")
BOUNDS = {"float32": 1e-5, "mixed_bfloat16": 3e-4, "mixed_float16": 3e-4}
CASES = [
    ("llama3", "full", "tensor 2", "float32"),
    ("llama3", "LoRA", "ZeRO 3", "mixed_bfloat16"),
    ("llama3", "full", "tensor 2", "mixed_float16"),
    ("llama3", "full", "pipeline 2", "mixed_float16"),
    ("llama3", "full", "tensor 2, recomputed", "float32"),
    ("llama3", "full", "ZeRO 2, recomputed", "float32"),
    ("mixtral", "full", "tensor 2", "float32"),
]


def spread(model, layout, data):
    """The model in a layout, which is to be trained."""
    name, _, more = layout.partition(", ")
    axis, size = name.split()
    batch = keras.tree.map_structure(lambda part: part[: families.BATCH], data[0])
    if axis == "pipeline":
        pipeline = Mesh(pipeline=2, devices=["CPU:0", "CPU:1"])
        return apply(graph.flat(model, None), pipeline, microbatches=2, batch=batch)
    sizes, zero = ({"tensor": 2}, 0) if axis == "tensor" else ({"data": 2}, int(size))
    model = apply(model, Mesh(**sizes, devices=["CPU:0", "CPU:1"]), zero=zero)
    return recompute(model, batch=batch) if more else model


def trained(model, data, kind, policy):
    x, y, weights = data
    with model.distribute_strategy.scope():
        # A gradient that is 0 but for rounding would become a step of any size below this epsilon.
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **families.CLIP[kind])
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**18)  # the first overflows
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=True)
    how = {"batch_size": families.BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, **how).history


@pytest.mark.parametrize(("family", "kind", "layout", "policy"), CASES, ids=[", ".join(case) for case in CASES])
def test_the_training_is_one_devices_under_xla(family, kind, layout, policy, caplog):
    keras.config.set_dtype_policy(policy)
    try:
        with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
            one, data = families.made(family, kind)
        expected = trained(one, data, kind, policy)
        whole = families.made(family, kind)[0]
        with contextlib.redirect_stdout(sys.stderr):  # the table of what is split
            model = spread(whole, layout, data)
        history = trained(model, data, kind, policy)
    finally:
        keras.config.set_dtype_policy("float32")
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=BOUNDS[policy])
    assert families.weights_apart(one, whole) < BOUNDS[policy]
    assert int(model.optimizer.iterations) == int(one.optimizer.iterations)
    assert (int(one.optimizer.iterations) < 4) == (policy == "mixed_float16" or kind == "LoRA")  # skipped, or gathered
    assert not [record for record in caplog.records if "cannot be traced" in record.getMessage()]
