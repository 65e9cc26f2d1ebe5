"""Sharded embedding tables, in one process: rows by index, one gradient per shard, one variable outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.parameter_server import embeddings

ROWS = np.arange(10, dtype="float32").reshape(5, 2)


def cut(*ends):
    parts = np.split(ROWS, ends)
    return [keras.Variable(part, name=f"embeddings_{at}") for at, part in enumerate(parts)]


@pytest.mark.parametrize("shards", [cut(), cut(2), cut(1, 2), cut(1, 2, 3, 4)], ids=len)
def test_rows_come_from_the_shard_that_holds_them(shards):
    tfgpu.repair_keras()
    ids = tf.constant([[4, 0, 2], [1, -1, 3]])
    with tf.GradientTape() as tape:
        found = embeddings._rows(shards, ids)
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found, ROWS[ids.numpy()])
    gradients = tape.gradient(loss, [shard.value for shard in shards])
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    # Row 4 is asked for twice, by 4 and by -1.
    total = np.concatenate([tf.convert_to_tensor(gradient).numpy() for gradient in gradients])
    np.testing.assert_array_equal(total[:, 0], [1, 1, 1, 1, 2])


def test_off_the_servers_an_embedding_is_keras_s():
    tfgpu.repair_keras()
    layer = keras.layers.Embedding(5, 2)
    layer.build()
    layer.set_weights([ROWS])
    assert not embeddings.is_on_servers(layer.embeddings)
    np.testing.assert_array_equal(layer(np.array([3, -1])), ROWS[[3, -1]])
