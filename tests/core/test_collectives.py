"""What replicas tell each other: in which operations of TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from benchmarks.peers import collectives as traced
from tfgpu.core import batch_rows, collectives, replication
from tfgpu.core.row_mixing import row_sums

PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"}


def on_replicas(step, replicas=3):
    """What a step returns on each replica, and the types of the operations in its graph."""
    strategy = tfgpu.strategy("mirrored", replicas)
    run = tf.function(lambda: strategy.run(step)).get_concrete_function()
    found = [[np.asarray(part) for part in strategy.experimental_local_results(each)] for each in run()]
    return found, {operation.type for operation in run.graph.get_operations()}


def number() -> tf.Tensor:
    return tf.cast(replication.replica_context().replica_id_in_sync_group, tf.float32)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 1)])
def test_a_table_of_the_replicas_values_takes_no_product(shape):
    def step():
        value = tf.fill(shape, number() + 1 + 2.0**-20)  # more digits than TF32 has
        return collectives.all_reduce([collectives.at_own_place(value), collectives.at_own_place(value, at=2)])

    ((table, *_), (last, *_)), types = on_replicas(step)
    for at in range(3):
        np.testing.assert_array_equal(table[at], np.full(shape, at + 1 + 2.0**-20, "float32"))
    np.testing.assert_array_equal(last[:2], np.zeros([2, *shape]))
    assert not types & PRODUCTS


def test_one_replicas_nan_is_its_own():
    def step():
        return collectives.all_reduce([collectives.at_own_place(tf.where(number() == 1.0, np.nan, number()))])

    (((table, *_),), _) = on_replicas(step)
    np.testing.assert_array_equal(table, [0, np.nan, 2])


def test_the_largest_values_and_the_rows_of_each_take_no_product():
    def step():
        rows = replication.replica_number(replication.replica_context()) + 1
        with batch_rows.given(tf.constant(rows)):
            found = batch_rows.known_rows()
        return *row_sums.most([number() + 2.0**-20]), found.offset, found.total

    (largest, offsets, totals), types = on_replicas(step)
    assert largest == [np.float32(2 + 2.0**-20)] * 3
    assert (offsets, totals) == ([0, 1, 3], [6] * 3)
    assert not types & PRODUCTS


def test_averaging_loss_scales_takes_no_product():
    strategy = tfgpu.strategy("averaging", 2, every=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(4, 1)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        model.compile(optimizer, loss=lambda y, predicted: keras.ops.mean(predicted, 1), jit_compile=False)
    graphs = traced.graphs(lambda: model.fit(np.ones((4, 3), "int32"), np.ones((4, 1), "float32"), verbose=0))
    nodes = [node for graph in graphs for part in (graph, *graph.library.function) for node in nodes_of(part)]
    types = {node.op for node in nodes}
    assert "AddN" in types and not types & PRODUCTS


def nodes_of(graph):
    return graph.node if isinstance(graph, tf.compat.v1.GraphDef) else graph.node_def
