"""Loss scaling and sparse gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import repairs


@pytest.mark.parametrize("rows", [[np.inf, 0.0], [0.0, np.inf], [np.nan, 0.0]], ids=str)
def test_an_infinite_row_is_seen_beside_a_finite_one_of_the_same_token(rows):
    repairs.repair_keras()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    sparse = tf.IndexedSlices(tf.constant(rows, tf.float32)[:, None], tf.constant([1, 1]), tf.constant([3, 1]))
    assert not optimizer.check_finite([None, tf.ones([2]), sparse])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_whose_embedding_overflows_is_skipped(replicas):
    """Token 1 stands in rows 0 and 2; the gradient of row 0 overflows, that of row 2, the last, is finite."""
    with tfgpu.strategy("mirrored", devices=replicas).scope():
        table = keras.layers.Embedding(3, 1, embeddings_initializer="ones")
        model = keras.Sequential([keras.Input((), dtype="int32"), table])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
        model.compile(optimizer, loss=lambda y, x: y * x, jit_compile=False)
    tokens, factors = np.array([1, 0, 1, 2]), np.array([[np.inf], [1.0], [1.0], [1.0]], "float32")
    model.fit(tokens, factors, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(table.embeddings, np.ones((3, 1)))
    assert float(optimizer.dynamic_scale.numpy()) == 1.0
