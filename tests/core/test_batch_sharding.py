"""A batch in pieces: every row once, in order, in equal parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfgpu
from tfgpu.core import batch_sharding, step_context
from tfgpu.core.feed import sharded_dataset


def all_pieces(batch, count):
    return [batch_sharding.replica_batch(batch, at, count) for at in range(count)]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(0, 23), count=st.integers(1, 8), is_known=st.booleans())
def test_every_row_goes_to_one_piece_in_order(rows, count, is_known):
    spec = tf.TensorSpec([rows if is_known else None], tf.int32)
    cut = tf.function(lambda batch: all_pieces(batch, count), input_signature=[spec])
    found = cut(tf.range(rows))
    lengths = [int(piece.local) for piece in found]
    assert np.concatenate([piece.data[: piece.local] for piece in found]).tolist() == list(range(rows))
    assert all(piece.data.numpy().tolist() == [0][:rows] for piece in found if not piece.local)  # a row stands in
    assert max(lengths) - min(lengths) <= 1
    starts = [sum(lengths[:at]) for at in range(count)]
    assert [int(p.offset) for p in found] == [s if n else 0 for s, n in zip(starts, lengths, strict=True)]
    assert {int(piece.total) for piece in found} == {rows}


def test_known_lengths_stay_known():
    spec = tf.TensorSpec([8, 3], tf.float32)
    graph = tf.function(lambda x: batch_sharding.replica_batch(x, 1, 4).data, input_signature=[spec])
    assert graph.get_concrete_function().output_shapes == tf.TensorShape([2, 3])


def test_structures_ragged_and_sparse():
    batch = {
        "a": tf.constant([[1, 2], [3, 4], [5, 6]]),
        "ragged": tf.ragged.constant([[1], [2, 3], []]),
        "sparse": tf.sparse.from_dense([[0, 1], [2, 0], [0, 3]]),
        "scalar": tf.constant(7),
        "none": None,
    }
    first, second = (piece.data for piece in all_pieces(batch, 2))
    assert first["a"].numpy().tolist() == [[1, 2], [3, 4]] and second["a"].numpy().tolist() == [[5, 6]]
    assert first["ragged"].to_list() == [[1], [2, 3]] and second["ragged"].to_list() == [[]]
    assert tf.sparse.to_dense(first["sparse"]).numpy().tolist() == [[0, 1], [2, 0]]
    assert tf.sparse.to_dense(second["sparse"]).numpy().tolist() == [[0, 3]]
    assert int(first["scalar"]) == int(second["scalar"]) == 7 and first["none"] is None


def test_unequal_parts_are_refused():
    with pytest.raises(ValueError, match="the same number of rows"):
        batch_sharding.replica_batch((tf.zeros([4, 1]), tf.zeros([3])), 0, 2)
    for rows in (None, 4):  # of the first part
        unknown = tf.function(
            lambda x, y: batch_sharding.replica_batch((x, y), 0, 2).data,
            input_signature=[tf.TensorSpec([rows]), tf.TensorSpec([None])],
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="the same number of rows"):
            unknown(tf.zeros([4]), tf.zeros([3]))


OTHER_LENGTHS_SCRIPT = """
import json
import keras, tensorflow as tf, tfgpu
strategy = tfgpu.strategy()
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((tf.ones([16 + 8 * rank, 3]), tf.ones([16 + 8 * rank, 1]))).batch(8)
try:
    model.fit(data, verbose=0)
    said = "nothing"
except tfgpu.errors.InputError as error:
    said = str(error)
own = tf.data.Options()
own.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
loss = model.fit(data.with_options(own), verbose=0, steps_per_epoch=2).history["loss"]
print(json.dumps({"said": said, "loss": loss}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_with_data_of_different_lengths_are_reported(together):
    found = together(OTHER_LENGTHS_SCRIPT, {"worker": 2})
    for rank, batches in ((0, 2), (1, 3)):
        assert f"this one's has {batches} batches" in found[f"worker{rank}"]["said"]
    assert found["worker0"]["loss"] == found["worker1"]["loss"]


def test_the_replicas_of_a_process_get_their_shards_in_order():
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    data = tf.data.Dataset.range(11).batch(6)
    with step_context.scope(gives_row_ranges=True):
        batches = list(sharded_dataset._Distributor(strategy).experimental_distribute_dataset(data))
    rows = [[piece.numpy().tolist() for piece in batch.data.values] for batch in batches]
    assert rows == [[[0, 1], [2, 3], [4], [5]], [[6, 7], [8], [9], [10]]]
    assert [[int(p) for p in batch.offset.values] for batch in batches] == [[0, 2, 4, 5], [0, 2, 3, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("has_none", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_learns_the_same_from_data_that_the_user_has_distributed(has_none):
    tfgpu.repair_keras()
    x = np.random.default_rng(0).normal(size=(19, 3)).astype("float32")
    learned = []
    for is_distributed in (False, True):
        keras.utils.set_random_seed(1)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(4)
        data = data.map(lambda x, y: (x, y, None)) if has_none else data
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("adam", "mse", steps_per_execution=2)
        model.fit(strategy.experimental_distribute_dataset(data) if is_distributed else data, epochs=2, verbose=0)
        learned.append(model.get_weights())
    for ours, theirs in zip(*learned, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_batches_are_read_and_sharded_in_host_memory():
    """Between the iterator and the devices' own operations no operation is left to TensorFlow's choice of device."""
    strategy = tf.distribute.MirroredStrategy(["CPU:1", "CPU:2"])
    iterator = iter(tf.data.Dataset.from_tensor_slices(tf.zeros([8, 3])).batch(4))

    @tf.function
    def read(iterator):
        has_value, get_value = sharded_dataset.next_batch(iterator)
        return tf.cond(has_value, lambda: sharded(get_value()), lambda: (tf.zeros([2, 3]),) * 2)

    def sharded(batch):
        return strategy.experimental_local_results(batch_sharding.shard(strategy, batch, gives_row_ranges=False))

    traced = read.get_concrete_function(iterator).graph.as_graph_def()
    nodes = [*traced.node, *(node for function in traced.library.function for node in function.node_def)]
    devices = {node.op: tf.DeviceSpec.from_string(node.device) for node in nodes}
    for kind in ("OptionalHasValue", "OptionalGetValue", "StridedSlice"):
        assert (devices[kind].device_type, devices[kind].device_index) == ("CPU", 0)
