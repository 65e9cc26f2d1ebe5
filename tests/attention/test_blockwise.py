"""Attention by blocks of queries is Keras's attention, forward to the bit, and holds no scores of a whole sequence."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.attention import blockwise
from tfgpu.attention.blockwise import Dropout, Masks

HEADS, SIZE = 4, 8


def given(queries, keys, shared=HEADS, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    shapes = (3, queries, HEADS, SIZE), (3, keys, shared, SIZE), (3, keys, shared, 6)
    return [tf.constant(random.normal(size=shape), dtype) for shape in shapes]


def with_gradients(function, inputs):
    """The output, and the gradients of a sum that weighs each of its numbers differently."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = tf.cast(function(*inputs), tf.float32)
        loss = tf.reduce_sum(output * tf.sin(tf.reshape(tf.range(tf.size(output), dtype=tf.float32), tf.shape(output))))
    return [output, *tape.gradient(loss, inputs)]


def check(inputs, bias=(), mask=None, causal=False, block=4, atol=1e-6, compiled=(False,)):
    def stock(query, key, value, *bias):
        if key.shape[2] == 1:  # an error in stock Keras
            key, value = (tf.repeat(each, HEADS, axis=2) for each in (key, value))
        return keras.ops.dot_product_attention(
            query, key, value, bias=bias[0] if bias else None, mask=mask, scale=0.3, is_causal=causal
        )

    def ours(query, key, value, *bias):
        how = {"bias": bias[0] if bias else None, "masks": Masks(pairs=mask, is_causal=causal)}
        return blockwise.attention(query, key, value, scale=0.3, block=block, **how)

    for jit in compiled:
        runs = [tf.function(lambda *all_, run=run: with_gradients(run, all_), jit_compile=jit) for run in (stock, ours)]
        for expected, found in zip(*(run(*inputs, *bias) for run in runs), strict=True):
            np.testing.assert_allclose(tf.cast(found, tf.float32), tf.cast(expected, tf.float32), atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shared", [HEADS, 2, 1])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (8, 12), (3, 7), (1, 5)])
def test_masks_biases_and_shared_heads(queries, keys, shared, jit):
    random = np.random.default_rng(1)
    mask = tf.constant(random.random((3, 1, queries, keys)) > 0.3)
    biases = [tf.constant(random.normal(size=(1, HEADS, rows, keys)), tf.float32) for rows in (queries, 1)]
    inputs = given(queries, keys, shared)
    check(inputs, compiled=(jit,))
    check(inputs, biases[:1], mask, causal=True, compiled=(jit,))
    check(inputs, biases[:1], causal=True, compiled=(jit,))
    check(inputs, biases[1:], mask, compiled=(jit,))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "atol"), [("float16", 4e-3), ("bfloat16", 3e-2), ("float64", 1e-12)])
def test_dtypes(dtype, atol):
    check(given(9, 9, dtype=dtype), causal=True, atol=max(atol, 1e-6))


@pytest.mark.slow
def test_a_dynamic_length_and_a_static_one_are_alike():
    inputs = given(9, 9)

    @tf.function(input_signature=[tf.TensorSpec([None, None, HEADS, each.shape[3]]) for each in inputs])
    def dynamic(*inputs):
        attend = lambda *all_: blockwise.attention(*all_, scale=0.3, masks=Masks(is_causal=True), block=4)  # noqa: E731
        return with_gradients(attend, inputs)

    for found, expected in zip(
        dynamic(*inputs),
        with_gradients(lambda *all_: keras.ops.dot_product_attention(*all_, scale=0.3, is_causal=True), inputs),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_dropout_leaves_out_its_rate_and_the_same_in_the_backward_pass():
    query, key, _ = given(40, 40)
    ones, seed = tf.ones([3, 40, HEADS, 1]), tf.constant([3, 4], tf.uint32)

    def attend(value):
        return blockwise.attention(query, key, value, scale=0.3, dropout=Dropout(0.25, seed), block=16)

    with tf.GradientTape() as tape:
        tape.watch(ones)
        output = attend(ones)
    assert float(tf.reduce_mean(output)) == pytest.approx(1, abs=0.05) and np.std(output) > 0.01
    np.testing.assert_array_equal(output, attend(ones))
    # The output is linear in the values: the gradient holds the same probabilities, added up over the queries.
    gradient = tape.gradient(output, ones)
    assert float(tf.reduce_sum(gradient)) == pytest.approx(float(tf.reduce_sum(output)), rel=1e-5)


def test_the_soft_cap():
    query, key, value = given(5, 5)
    scores = 0.3 * np.einsum("btnh,bsnh->bnts", query, key)
    chances = tf.nn.softmax(0.5 * np.tanh(scores / 0.5))
    found = blockwise.attention(query, key, value, scale=0.3, soft_cap=0.5, block=2)
    np.testing.assert_allclose(found, np.einsum("bnts,bsnh->btnh", chances, value), atol=1e-6)


@pytest.mark.slow
def test_a_query_that_sees_no_key():
    """Keras gives all keys the same weight then, also those that come later."""
    inputs, mask = given(9, 9), tf.sequence_mask([9, 9, 9], 9)[:, None, None, ::-1]
    check(inputs, mask=tf.logical_and(mask, tf.range(9) > 4), causal=True)
