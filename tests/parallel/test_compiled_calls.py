"""XLA in models over several devices: it compiles the calls of layers, and the result is one device's under XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.parallel import Mesh, apply, place, shard

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 8)).astype("float32"), RNG.normal(size=(50, 1)).astype("float32")


def in_a_row(*middle):
    keras.utils.set_random_seed(1)
    pair = layers.Dense(16, "gelu", name="up"), layers.Dense(8, name="down")
    ends = layers.Dense(8, "tanh", name="last"), layers.Dense(1, name="out")
    return keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu", name="first"), *middle, *pair, *ends])


def made():
    return in_a_row(layers.BatchNormalization(name="norm"), layers.Dropout(0.2, seed=1, name="drop"))


class Noting:
    """The mean squared error, which notes the graph of the step."""

    def __init__(self):
        self.graphs = []

    def __call__(self, labels, outputs):
        graph = tf.compat.v1.get_default_graph()
        while not tf.executing_eagerly() and getattr(graph, "outer_graph", None) is not None:
            self.graphs.append(graph)
            graph = graph.outer_graph
        return ops.mean(ops.square(labels - outputs), axis=-1)


def outcome(model, loss="mse"):
    """History, weights, evaluation and predictions; the last batch has 2 rows."""
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.01), loss, jit_compile=True)
    history = model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0).history["loss"]
    return history, model.get_weights(), model.evaluate(X, Y, 16, verbose=0), model.predict(X, 16, verbose=0)


def assert_alike(found, expected):
    for mine, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def expected():
    """One device's, under XLA, which draws other numbers than TensorFlow does."""
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        return outcome(made())


def functions_of(graphs):
    """The functions that a step calls, by name; and those that XLA compiles."""
    found = {each.signature.name: each for graph in graphs for each in graph.as_graph_def().library.function}
    return found, {name: each for name, each in found.items() if each.attr["_XlaMustCompile"].b}


def replicated(stage, make=made):
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = make()
    return shard(model, stage=stage)


def on_mesh(zero=0, **sizes):
    mesh = Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])
    return apply(made(), mesh, zero=zero, **({"microbatches": 2} if mesh.pipeline > 1 else {}))


LAYOUTS = {
    "tensor 2": lambda: on_mesh(tensor=2),
    "data 2 x tensor 2": lambda: on_mesh(data=2, tensor=2),
    "pipeline 2": lambda: on_mesh(pipeline=2),
    "data 2 x pipeline 2": lambda: on_mesh(data=2, pipeline=2),
    "zero 3 on a mesh": lambda: on_mesh(3, data=2),
    "zero 3": lambda: replicated(3),
    "placed": lambda: place(made(), {"first": "CPU:1", "*": "CPU:0"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_one_devices_under_xla(layout, expected):
    loss, model = Noting(), LAYOUTS[layout]()
    assert_alike(outcome(model, loss), expected)
    every, compiled = functions_of(loss.graphs)
    assert len([name for name in compiled if "forward" in name]) >= 3
    assert len([name for name in compiled if "backward" in name]) >= 3
    for function in compiled.values():
        nodes = function.node_def
        assert not [node.op for node in nodes if "Collective" in node.op or "Nccl" in node.op]
        assert not [node.name for node in nodes if "tensor_sum" in node.name]
        assert len({node.device for node in nodes if node.device}) <= 1
    if "tensor" in layout:  # the sums over devices are in the step itself
        outside = [node.name for name in every.keys() - compiled.keys() for node in every[name].node_def]
        outside += [op.name for graph in loss.graphs for op in graph.get_operations()]
        assert any("tensor_sum" in name for name in outside)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_replicas_with_a_sharded_optimizer_compile_all_but_collectives(stage, expected):
    loss = Noting()
    assert_alike(outcome(replicated(stage), loss), expected)
    compiled = set()
    for op in (op for graph in loss.graphs for op in graph.get_operations()):
        if "_XlaCompile" in op.node_def.attr and op.get_attr("_XlaCompile"):
            compiled.add(op.type)
    assert "MatMul" in compiled
    assert not any("Collective" in kind for kind in compiled)


class Looked(layers.Layer):
    """Calls Python."""

    def call(self, x):
        return ops.reshape(tf.numpy_function(lambda rows: rows * 2, [x], "float32"), ops.shape(x))


class Kept(layers.Layer):
    """Leaves a tensor in an attribute."""

    def call(self, x):
        self.seen = ops.mean(x, axis=-1)
        return x


class Centered(layers.Layer):
    """Takes the mean of all rows from each."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Block(layers.Layer):
    def __init__(self, **how):
        super().__init__(**how)
        self.dense, self.inner = layers.Dense(8, name="dense"), Centered(name="inner")

    def call(self, x):
        return self.inner(self.dense(x))


@pytest.mark.slow
def test_what_cannot_be_compiled_is_named_and_runs_as_ever(caplog):
    model = in_a_row(Looked(name="looked"), Kept(name="kept"), Block(name="block"))
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        one = in_a_row(Looked(name="looked"), Kept(name="kept"), Block(name="block"))
        one.compile(keras.optimizers.AdamW(0.01), "mse", jit_compile=False)
    expected = one.fit(X, Y, 16, shuffle=False, verbose=0).history["loss"]
    model = apply(model, Mesh(data=2, devices=["CPU:0", "CPU:1"]))
    loss = Noting()
    with caplog.at_level("INFO", logger="tfgpu"):
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.AdamW(0.01), loss, jit_compile=True)
        found = model.fit(X, Y, 16, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert "XLA compiles the calls of its layers, forward and backward, each on its device" in caplog.text
    assert "the call of 'looked' (Looked): XLA cannot compile PyFunc" in caplog.text
    assert "the call of 'kept' (Kept): it keeps a tensor in its attribute 'seen'" in caplog.text
    assert "the call of 'block' (Block) as a whole, but those of layers within it" in caplog.text
    assert "the call of 'inner'" not in caplog.text  # computed on all rows, which come from outside
    assert len(functions_of(loss.graphs)[1]) >= 6
