"""Gradients of a spread model meet in packs, among the devices that hold the weights, within the backward pass."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.parallel import Mesh, apply, place

WIDTH, LAYERS, ROWS = 8, 4, 8
PACK = WIDTH * WIDTH * 4  # more than the weights of a layer, less than those of two
OWN, OTHERS = ("CPU:0", "CPU:2"), ("CPU:1", "CPU:3")
ALL = [f"CPU:{number}" for number in range(4)]


def placed(model):
    """Two layers on the first device of each replica, the rest on the second."""
    return place(model, {"layer[01]": OWN, "*": OTHERS})


def crossed(model):
    """The devices of the second half are those of the first, the other way round."""
    return place(model, {"layer[01]": OWN, "*": OWN[::-1]})


LAYOUTS = {
    "tensor": lambda model: apply(model, Mesh(data=2, tensor=2, devices=ALL)),
    "pipeline": lambda model: apply(model, Mesh(data=2, pipeline=2, devices=ALL), microbatches=2, cuts=["layer2"]),
    "placed": placed,
    "crossed": crossed,
}
# A layer has 72 numbers and the last one 27. Split along `tensor`, a column and its row have 36 + 32, and the first
# device also the row's bias. Crossed, all packs are on the replicas' own devices, and the halves share one.
PACKS = {
    "tensor": ([67, 76, 36], [68, 68]),
    "pipeline": ([72, 72], [99, 72]),
    "placed": ([72, 72], [99, 72]),
    "crossed": ([99, 72, 72, 72], []),
}


def spread(layout, optimizer="sgd", pack=PACK, policy="float32"):
    """A model with weights on two devices a replica, made in the scope of a strategy with packs of a size."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("mirrored", OWN, bytes_per_pack=pack).scope():
        model = made(policy)
    model = LAYOUTS[layout](model)
    with model.distribute_strategy.scope():
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", jit_compile=False)
    return model


def made(policy="float32"):
    x = inputs = keras.Input((WIDTH,))
    for at in range(LAYERS):
        x = keras.layers.Dense(WIDTH, "tanh", name=f"layer{at}", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last", dtype="float32")(x))


def step_of(model) -> tf.Graph:
    """The graph of a training step."""
    strategy = model.distribute_strategy
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    def step():
        return model.train_step((tf.ones([ROWS, WIDTH]), tf.ones([ROWS, 3])))

    return tf.function(lambda: strategy.run(step), autograph=False).get_concrete_function().graph


def packs_on(graph: tf.Graph, device: str) -> list[tuple[tf.Operation, int]]:
    """The collectives of a device, or the conditions that hold them, as they were made; and the numbers in each."""
    found, library = [], {each.signature.name: each for each in graph.as_graph_def().library.function}
    for each in graph.get_operations():
        if each.type == "CollectiveReduceV2" and each.device.endswith(device):
            found.append((each, each.inputs[0].shape.num_elements()))
        elif each.type == "If":
            inside = library[each.get_attr("then_branch").name]
            if any(node.op == "CollectiveReduceV2" and node.device.endswith(device) for node in inside.node_def):
                found.append((each, sum(output.shape.num_elements() for output in each.outputs)))
    return found


def products_before(operation: tf.Operation, *, waiting: bool) -> set[tf.Operation]:
    """The matrix products whose results an operation takes, or is; with `waiting`, all that run before it."""
    found, left = {operation}, [operation]
    while left:
        each = left.pop()
        for before in [*(tensor.op for tensor in each.inputs), *(each.control_inputs if waiting else ())]:
            if before not in found:
                found.add(before)
                left.append(before)
    return {each for each in found if "MatMul" in each.type}


@pytest.mark.sample("placed-plain")
@pytest.mark.parametrize("steps", [None, 2], ids=["plain", "accumulated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_group_of_devices_sums_in_packs(layout, steps):
    with gpu_way.gpu_way():
        graph = step_of(spread(layout, lambda: keras.optimizers.SGD(gradient_accumulation_steps=steps)))
    for devices, sizes in zip((OWN, OTHERS), PACKS[layout], strict=True):
        for device in devices:
            needed, before, counts = set(), None, []
            packs = packs_on(graph, device)
            assert [size for _, size in packs] == sizes
            for pack, _ in packs:
                for gradient in pack.inputs:  # the schedule of a pipeline orders its products
                    needed |= products_before(gradient.op, waiting=layout == "pipeline")
                assert products_before(pack, waiting=True) == needed  # no gradients but its own, and earlier packs'
                assert before is None or before in pack.control_inputs  # one order on all devices
                before = pack
                counts.append(len(needed))
            assert counts == sorted(set(counts))  # a pack starts before the products of the next one


OPTIMIZERS = {
    "adam": (lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0), "float32"),
    "accumulated": (lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "float32"),
    "float16": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0), "mixed_float16"),
}


def fitted(model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(36, WIDTH)).astype("float32"), rng.normal(size=(36, 3)).astype("float32")
    model.fit(x, y, ROWS, epochs=2, shuffle=False, verbose=0)  # the last batch has 4 rows
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_change_no_bit_and_no_result(layout, kind):
    optimizer, policy = OPTIMIZERS[kind]
    with gpu_way.gpu_way():
        found, in_one = (fitted(spread(layout, optimizer, pack, policy)) for pack in (PACK, 0))
    keras.utils.set_random_seed(0)
    one = made(policy)
    one.compile(optimizer(), "mse", jit_compile=False)
    bound = 2e-2 if policy == "mixed_float16" else 1e-5
    for packed, whole, expected in zip(found, in_one, fitted(one), strict=True):
        np.testing.assert_array_equal(packed, whole)
        np.testing.assert_allclose(packed, expected, atol=bound)
