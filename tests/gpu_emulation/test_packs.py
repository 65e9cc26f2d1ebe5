"""Packs of gradients are sent within the backward pass: each waits for its own gradients and the packs before it.

Those of spread models are in `tests/parallel/test_gradient_packs.py`.
"""

import gpu_way
import keras
import numpy as np
import pytest
import run_order
import tensorflow as tf
import tracer
from flat_graph import Node
from traced_models import ROWS

import tfgpu
from tfgpu.compat import collective_order

LAYERS = 4
PACK = 8 * 8 * 4  # more than the weights of a layer, less than those of two


def fitted(optimizer="adam", precision="float32"):
    """The weights of a model with BatchNormalization after two steps, and the flat graph of `fit`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"], bytes_per_pack=PACK)
        with strategy.scope():
            x = inputs = keras.Input((8,))
            for _ in range(LAYERS):
                x = keras.layers.Dense(8, use_bias=False, dtype=precision)(x)
                x = keras.layers.BatchNormalization(dtype=precision)(x)
            model = keras.Model(inputs, keras.layers.Dense(3)(x))
            model.compile(optimizer, "mse", jit_compile=False)
        rows = np.random.default_rng(0).normal(size=(4 * ROWS, 8)).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :3])).batch(2 * ROWS, drop_remainder=True)
        with tracer.recording() as calls:
            model.fit(data, verbose=0)
    return model.get_weights(), tracer.placed(calls.largest.function, calls.largest.devices)[0]


def collectives_of(nodes: list[Node]) -> list[Node]:
    """Those of a step on the first GPU, in their order."""
    found = [node for node in nodes if node.type == "CollectiveReduceV2" and node.loops and "CPU:1" in node.device]
    ordered, is_only = run_order.in_order(found)
    assert is_only
    return ordered


def products_before(node: Node, *, waiting: bool) -> set[Node]:
    """The first GPU's matrix products whose results a collective takes; with `waiting`, all that run before it."""
    found, left = set(), [node]
    while left:
        each = left.pop()
        sources = [source for source, _ in each.inputs if source.type != "NextIteration"]
        for before in sources + [one for other in each.waits for one in other.nodes] if waiting else sources:
            if before not in found:
                found.add(before)
                left.append(before)
    return {each for each in found if each.type == "MatMul" and "CPU:1" in each.device}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (lambda: "adam", "float32"),
        (lambda: keras.optimizers.Adam(global_clipnorm=0.5), "float32"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mixed_float16"),
        (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), "float32"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(gradient_accumulation_steps=2)),
            "mixed_float16",
        ),
    ],
    ids=["plain", "clipped", "float16", "accumulated", "accumulated float16"],
)
def test_a_pack_waits_for_no_products_but_those_of_its_gradients(optimizer, precision):
    _, nodes = fitted(optimizer(), precision)
    needed, waits = set(), []
    for each in collectives_of(nodes):
        needed |= products_before(each, waiting=False)
        assert products_before(each, waiting=True) == needed
        waits.append(len(needed))
    # Moments of 4 layers, forward; those of the last layer backward, and a pack of what comes after it; and so on.
    assert waits == [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14]


@pytest.mark.slow
def test_the_order_changes_no_bit(monkeypatch):
    found, _ = fitted()
    monkeypatch.setattr(collective_order, "_orders_functions", lambda: False)
    in_pythons_order, _ = fitted()
    for ours, theirs in zip(found, in_pythons_order, strict=True):
        np.testing.assert_array_equal(ours, theirs)
