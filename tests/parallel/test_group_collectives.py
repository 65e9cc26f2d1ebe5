"""BatchNormalization's moments and slices of large tables of a spread model meet among the devices that hold them.

Else each would be sent to the replica's first device, summed there and sent back; for a table, Keras's optimizers would
then compute there as well, and send the whole table and its slots. `tests/compat/test_device_groups.py` has the parts.
"""

import gpu_way
import keras
import numpy as np
import pytest
import run_order
import tensorflow as tf
import tracer
from flat_graph import Node

import tfgpu
from tfgpu.parallel import Mesh, apply, place

WIDTH, ROWS, WORDS, TOKENS, REPLICAS = 8, 26, 500, 300, 2
OWN, OTHERS = ("CPU:0", "CPU:2"), ("CPU:1", "CPU:3")
ALL = [f"CPU:{number}" for number in range(4)]
MOMENTS = REPLICAS * 2 * WIDTH  # numbers in a collective: mean and variance of each replica
GATHERED = ROWS // REPLICAS * TOKENS * (64 + 2)  # what a replica gives to one: values, and indices of 64 bits
PACK = 300  # bytes, less than those of a pair's weights
LAYER = WIDTH * WIDTH + WIDTH + 2 * WIDTH  # a Dense layer's weights and those of its BatchNormalization


def normalized():
    """Four pairs of a Dense layer and a BatchNormalization."""
    x = inputs = keras.Input((WIDTH,))
    for at in range(4):
        x = keras.layers.Dense(WIDTH, "tanh", name=f"layer{at}")(x)
        x = keras.layers.BatchNormalization(name=f"norm{at}")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(x))


def tables():
    """Two tables whose slices are too many for the pack of the dense gradients."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Dense(WIDTH, name="layer0")(keras.layers.Embedding(WORDS, 64, name="layer1")(tokens))
    x = keras.layers.Concatenate()([x, keras.layers.Embedding(WORDS, 64, name="layer2")(tokens)])
    return keras.Model(tokens, keras.layers.Dense(3, name="last")(keras.layers.GlobalAveragePooling1D()(x)))


def placed(model):
    """The layers 0 and 1 on the first device of each replica, the rest on the second."""
    firsts = [layer.name for layer in model.layers if layer.name[-1] in "01"]
    return place(model, {**dict.fromkeys(firsts, OWN), "*": OTHERS})


def crossed(model):
    """The devices of the second half are those of the first, the other way round: they cannot be a group."""
    firsts = [layer.name for layer in model.layers if layer.name[-1] in "01"]
    return place(model, {**dict.fromkeys(firsts, OWN), "*": OWN[::-1]})


LAYOUTS = {
    "placed": placed,
    "crossed": crossed,
    "tensor": lambda model: apply(model, Mesh(data=2, tensor=2, devices=ALL)),
    "pipeline": lambda model: apply(model, Mesh(data=2, pipeline=2, devices=ALL), microbatches=2, cuts=["layer2"]),
}


def spread(make, layout, optimizer="adam"):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("mirrored", OWN, bytes_per_pack=PACK).scope():
        model = make()
    model = LAYOUTS[layout](model)
    with model.distribute_strategy.scope():
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def rows_of(model, count):
    rng = np.random.default_rng(0)
    shape = count, *model.inputs[0].shape[1:]
    x = rng.integers(0, WORDS, shape) if model.inputs[0].dtype == "int32" else rng.normal(size=shape)
    return x.astype(model.inputs[0].dtype), rng.normal(size=(count, 3)).astype("float32")


def step_of(make, layout) -> list[Node]:
    """The operations of a training step."""
    with gpu_way.gpu_way(), tracer.recording() as calls:
        model = spread(make, layout)
        data = tf.data.Dataset.from_tensor_slices(rows_of(model, 2 * ROWS)).batch(ROWS, drop_remainder=True)
        model.fit(data, verbose=0)
    return [node for node in tracer.placed(calls.largest.function)[0] if node.loops]


def collectives_on(nodes: list[Node], device: str) -> list[int]:
    """The numbers that each collective of a device takes, in the only order in which they can run."""
    found = [node for node in nodes if node.type.startswith("Collective") and node.device.endswith(device)]
    ordered, is_only = run_order.in_order(found)
    assert is_only
    return [source.outputs[at][1].num_elements() for source, at in (node.inputs[0] for node in ordered)]


def copied(nodes: list[Node]) -> list[int]:
    """The numbers in each tensor without rows that a step copies between devices, scalars left out."""
    found = {}
    for node in nodes:
        for source, at in node.inputs:
            dtype, shape = source.outputs[at]
            is_copied = "" not in (source.device, node.device) and source.device[-5:] != node.device[-5:]
            if is_copied and dtype.is_floating and shape.rank and shape[0] != ROWS // REPLICAS:
                found[source, at, node.device] = shape.num_elements()
    return sorted(found.values())


@pytest.mark.slow
def test_moments_meet_where_their_layers_are():
    nodes = step_of(normalized, "placed")
    assert copied(nodes) == []
    # Forward two layers, backward two: a pack of what follows a layer's moments starts before the next moments.
    for devices, last in ((OWN, 0), (OTHERS, 3 * WIDTH + 3)):
        for device in devices:
            assert collectives_on(nodes, device) == [MOMENTS] * 3 + [LAYER + last] + [MOMENTS, LAYER]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_moments_of_a_mesh_meet_where_their_layers_are(layout):
    nodes = step_of(normalized, layout)
    assert copied(nodes) == []
    moments = [sum(size in (MOMENTS, MOMENTS // 2) for size in collectives_on(nodes, device)) for device in ALL]
    # Along `tensor`, two of four layers are split, and the other two are on the first device.
    assert moments == ([8, 4, 8, 4] if layout == "tensor" else [4] * 4)


@pytest.mark.slow
def test_slices_meet_where_their_table_is():
    nodes = step_of(tables, "placed")
    assert copied(nodes) == [WIDTH, WIDTH]  # a bias's gradient
    for device in ALL:
        assert collectives_on(nodes, device)[-1] == GATHERED


@pytest.mark.slow
def test_slices_whose_devices_cannot_be_a_group_are_sent_back():
    """An optimizer computes where they are: elsewhere, it would send the table and its slots."""
    nodes = step_of(tables, "crossed")
    assert WORDS * 64 not in copied(nodes)
    assert collectives_on(nodes, OWN[0])[-1] == 2 * GATHERED
    assert collectives_on(nodes, OTHERS[0]) == []


def adam(steps=None):
    return keras.optimizers.Adam(0.01, global_clipnorm=1.0, gradient_accumulation_steps=steps)


def fitted(model) -> list[np.ndarray]:
    x, y = rows_of(model, 3 * ROWS - 5)  # an uneven last batch
    model.fit(x, y, ROWS, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


CASES = [(normalized, layout, None) for layout in LAYOUTS] + [(normalized, "placed", 2)]
CASES += [(tables, layout, None) for layout in ("placed", "crossed", "tensor")]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "layout", "steps"), CASES)
def test_the_result_is_one_device_s(make, layout, steps):
    with gpu_way.gpu_way():
        found = fitted(spread(make, layout, adam(steps)))
    keras.utils.set_random_seed(0)
    one = make()
    one.compile(adam(steps), "mse", jit_compile=False)
    for ours, expected in zip(found, fitted(one), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
