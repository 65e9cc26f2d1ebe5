"""A custom gradient computes what TensorFlow's does, and is freed with its graph."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core.row_mixing import row_sums
from tfgpu.parallel import Mesh, apply, recompute


def live_graphs() -> int:
    """How many graphs are in memory."""
    gc.collect()
    return sum(issubclass(type(thing), tf.Graph) for thing in gc.get_objects())


def cube(given):
    return given**3, lambda upstream: 5 * upstream * given  # not the gradient of a cube, to be told from it


@pytest.fixture(autouse=True)
def repaired():
    tfgpu.repair_keras()


@pytest.mark.parametrize("run", [lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)])
def test_values_and_gradients(run):
    def step(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = tf.custom_gradient(cube)(value)
        return result, tape.gradient(result, value)

    result, gradient = run(step)(tf.constant([2.0, 3.0]))
    assert np.array_equal(result, [8, 27]) and np.array_equal(gradient, [10, 15])


def test_a_ragged_result():
    @tf.custom_gradient
    def rows(values):
        splits = tf.identity_n([tf.constant([0, 2, 3])])[0]  # of an operation that has no custom gradient
        return tf.RaggedTensor.from_row_splits(values, splits), lambda upstream: 3 * upstream.values

    @tf.function
    def step(values):
        return tf.gradients(rows(values).values, values)

    assert np.array_equal(step(tf.constant([1.0, 2.0, 3.0]))[0], [3, 3, 3])


def test_several_in_one_graph():
    def step(value):
        return tf.gradients(tf.custom_gradient(cube)(tf.custom_gradient(cube)(value)), value)[0]

    assert float(tf.function(step)(tf.constant(2.0))) == 5 * 8 * 5 * 2


def test_variables_and_nested_results():
    weight = tf.Variable(3.0)

    @tf.custom_gradient
    def scaled(given):
        def gradient(upstream, *, variables):
            (at,) = variables
            return upstream * at, [upstream * 7]

        return {"scaled": weight * given}, gradient

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            given = tf.constant(2.0)
            tape.watch(given)
            result = scaled(given)["scaled"]
        return tape.gradient(result, [given, weight])

    assert [float(value) for value in step()] == [3, 7]


def test_a_freed_graph_leaves_no_gradient():
    graphs = []

    @tf.function
    def step(value):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return tf.gradients(tf.custom_gradient(cube)(value), value)

    step(tf.constant(2.0))
    assert graphs[0]() is not None
    del step
    gc.collect()
    assert graphs[0]() is None


WAYS = {
    "BatchNormalization": lambda make: replicated(make, keras.Sequential),
    "of_batch": lambda make: replicated(make, Summed),
    "recomputed": lambda make: recompute(make(), "layers"),
    "pipeline": lambda make: apply(make(), mesh(pipeline=2), microbatches=2),
    "tensor": lambda make: apply(make(), mesh(tensor=2)),
    "ZeRO 3": lambda make: apply(make(), mesh(data=2), zero=3),
}


def mesh(**sizes):
    return Mesh(**sizes, devices=["CPU:0", "CPU:1"])


class Summed(keras.Sequential):
    def call(self, x, **options):
        return super().call(x, **options) + row_sums.of_batch(tf.reduce_sum(x))


def replicated(make, kind):
    with tfgpu.strategy("mirrored", devices=2).scope():
        return make(kind)


def fit_anew(way: str) -> None:
    def make(kind=keras.Sequential):
        hidden = [keras.layers.Dense(4, "relu", name="first"), keras.layers.BatchNormalization()]
        return kind([keras.Input((4,)), *hidden, keras.layers.Dense(4)])

    model = WAYS[way](make)
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 4), "float32"), batch_size=8, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_freed_models_leave_no_graph(way):
    fit_anew(way)
    before = live_graphs()
    for _ in range(2):
        fit_anew(way)
    assert live_graphs() == before
