"""Cut embedding tables, in one process: rows by number, one gradient a shard, one variable to the outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.keras_fixes import tables

ROWS = np.arange(10, dtype="float32").reshape(5, 2)


def cut(*ends):
    parts = np.split(ROWS, ends)
    return [keras.Variable(part, name=f"embeddings_{at}") for at, part in enumerate(parts)]


@pytest.mark.parametrize("shards", [cut(), cut(2), cut(1, 2), cut(1, 2, 3, 4)], ids=len)
def test_rows_come_from_the_shard_that_holds_them(shards):
    tfgpu.repair_keras()
    ids = tf.constant([[4, 0, 2], [1, -1, 3]])
    with tf.GradientTape() as tape:
        found = tables._rows(shards, ids)
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found, ROWS[ids.numpy()])
    gradients = tape.gradient(loss, [shard.value for shard in shards])
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    # Row 4 is asked for twice, by 4 and by -1.
    total = np.concatenate([tf.convert_to_tensor(gradient).numpy() for gradient in gradients])
    np.testing.assert_array_equal(total[:, 0], [1, 1, 1, 1, 2])


def test_a_whole_is_read_and_written_as_one_variable():
    shards = cut(2)
    whole = tables.Whole(shards, "table")
    assert (tuple(whole.shape), whole.dtype, whole.path) == ((5, 2), "float32", "table")
    np.testing.assert_array_equal(np.asarray(whole), ROWS)
    np.testing.assert_array_equal(tf.convert_to_tensor(whole), ROWS)
    whole.assign(-ROWS)
    np.testing.assert_array_equal(shards[1].numpy(), -ROWS[2:])
    with pytest.raises(tfgpu.InputError, match=r"table has shape \(5, 2\). Received: \(4, 2\)"):
        whole.assign(ROWS[:4])


def test_shards_and_their_slots_are_joined_in_the_order_of_the_uncut():
    shards, key = cut(2), object()
    slots = [keras.Variable(np.zeros((size, 2))) for size in (2, 2, 3, 3)]
    bias = keras.Variable([1.0])
    for shard in shards:
        shard._tfgpu_shard_of, shard._tfgpu_whole_path = (key,), "table"
    for slot, name in zip(slots, ("momentum", "velocity") * 2, strict=True):
        slot._tfgpu_shard_of, slot._tfgpu_whole_path = (key, name), f"table/{name}"
    found = tables.whole([*shards, bias, *slots])
    assert [v.path for v in found] == ["table", bias.path, "table/momentum", "table/velocity"]
    assert [tuple(v.shape) for v in found] == [(5, 2), (1,), (5, 2), (5, 2)]


def test_off_the_servers_an_embedding_is_keras_s():
    tfgpu.repair_keras()
    layer = keras.layers.Embedding(5, 2)
    layer.build()
    layer.set_weights([ROWS])
    assert not tables.is_on_servers(layer.embeddings)
    np.testing.assert_array_equal(layer(np.array([3, -1])), ROWS[[3, -1]])
