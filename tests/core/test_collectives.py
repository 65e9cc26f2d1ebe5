"""What replicas exchange, and with which TensorFlow operations."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_steps import NCCL_TAKES, run_on_replicas

import tfgpu
from benchmarks.peers import collectives as traced
from tfgpu.core import batch_rows, collectives, replication, travel
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
        return collectives.all_reduce([travel.at_own_place(value), travel.at_own_place(value, at=2)])

    ((table, *_), (last, *_)), types = on_replicas(step)
    for at in range(3):
        np.testing.assert_array_equal(table[at], np.full(shape, at + 1 + 2.0**-20, "float32"))
    np.testing.assert_array_equal(last[:2], np.zeros([2, *shape]))
    assert not types & PRODUCTS


def test_a_nan_stays_on_its_replica():
    def step():
        return collectives.all_reduce([travel.at_own_place(tf.where(number() == 1.0, np.nan, number()))])

    (((table, *_),), _) = on_replicas(step)
    np.testing.assert_array_equal(table, [0, np.nan, 2])


def test_the_largest_values_and_the_rows_of_each_take_no_product():
    def step():
        rows = replication.replica_number(replication.replica_context()) + 1
        with batch_rows.given(tf.constant(rows), {}):
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


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [
        ("bool", "float32"),
        ("uint8", "float32"),
        ("int32", "float64"),
        ("int64", "float64"),
        ("uint64", "float64"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
    ],
)
def test_sums_travel_in_dtypes_that_nccl_takes(dtype, sent):
    value = {"int32": 2**30 - 1, "int64": -(2**60) - 1, "uint64": 2**62 + 1, "uint8": 100, "bool": 1}.get(dtype, 1.5)
    ((total, *_),), found = run_on_replicas(lambda: collectives.all_reduce([tf.cast(tf.fill([3], value), dtype)]))
    assert total.dtype == tf.as_dtype(dtype).as_numpy_dtype
    np.testing.assert_array_equal(total, np.full(3, 2 * value).astype(total.dtype))
    assert [each.dtype for each in found] == [sent] and sent in NCCL_TAKES
    assert {each.hint for each in found} == {"nccl"}


def test_small_numbers_share_the_pack_of_the_gradients():
    _, found = run_on_replicas(
        lambda: collectives.all_reduce([tf.ones([5]), tf.constant(True), tf.ones([2], tf.bfloat16)])
    )
    assert len(found) == 1


def test_small_values_share_one_copy_to_the_host():
    shapes = [(), (2, 3), (travel.HOST_PACK_BYTES // 4 + 1,), (0,), (4, 1)]
    strategy = tfgpu.strategy("mirrored", 2)

    def step():
        small = tf.IndexedSlices(tf.fill([1, 3], number()), tf.constant([1]), tf.constant([9, 3]))
        values = [tf.fill(shape, number() + at) for at, shape in enumerate(shapes)]
        return collectives.all_reduce([*values, small, tf.constant(True), None, tf.constant(2**30, tf.int64)])

    run = tf.function(lambda: strategy.run(step)).get_concrete_function()
    *sums, slices, truth, number_sum = (strategy.experimental_local_results(each) for each in run() if each is not None)
    for at, (shape, found) in enumerate(zip(shapes, sums, strict=True)):
        for each in found:
            np.testing.assert_array_equal(each, np.full(shape, 2 * at + 1, "float32"))
    np.testing.assert_array_equal(slices[-1].values, [[0] * 3, [1] * 3])
    assert (truth[0].dtype, bool(truth[0]), int(number_sum[1])) == (tf.bool, True, 2**31)
    added = [op for op in run.graph.get_operations() if op.type == "AddN"]
    assert len(added) == 3, "the float32 values in one, the large one, and the integer's halves"


def test_one_replica_sends_nothing():
    def step():
        slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 4]), tf.constant([9, 3]))
        dense, sparse, none = collectives.all_reduce([tf.ones([4]), slices, None])
        assert none is None
        return dense, sparse.values, collectives.sum_small([tf.ones([])])[0]

    (dense, rows, small), found = run_on_replicas(step, replicas=1)
    assert found == []
    assert (dense[0].tolist(), rows[0].tolist(), small) == ([1.0] * 4, [[1.0] * 3] * 2, [1.0])


def test_gradient_packs_wait_for_nothing_else():
    """The last layers' gradients are ready first: their pack does not wait for those of the first layers."""
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", ["CPU:1", "CPU:2"], bytes_per_pack=399)

        def step():
            return collectives.sum_gradients([tf.exp(tf.fill([100], number() + at), f"layer{at}") for at in range(3)])

        run = tf.function(lambda: strategy.run(step)).get_concrete_function()
    packs = [op for op in run.graph.get_operations() if op.type == "CollectiveReduceV2" and op.device.endswith("CPU:1")]
    waits = [{at for at in range(3) if any(f"layer{at}" in op.name for op in sources(pack))} for pack in packs]
    assert waits == [{2}, {1, 2}, {0, 1, 2}]  # in one order on all devices


def sources(operation) -> set:
    """All operations that run before an operation: whose results it needs, or which it waits for."""
    found, left = set(), [operation]
    while left:
        each = left.pop()
        for before in [*(tensor.op for tensor in each.inputs), *each.control_inputs]:
            if before not in found:
                found.add(before)
                left.append(before)
    return found


def test_packs_are_of_32_mib_on_gpus_and_of_all_values_on_cpus():
    strategy = tfgpu.strategy("mirrored", 2)
    assert collectives.communication_options(strategy).bytes_per_pack == 0
    with gpu_way.gpu_way():
        assert collectives.communication_options(strategy).bytes_per_pack == 32 * 2**20
        assert collectives.communication_options(tfgpu.strategy("mirrored", 2, bytes_per_pack=0)).bytes_per_pack == 0
