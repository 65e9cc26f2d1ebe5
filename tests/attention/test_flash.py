"""`keras.config.enable_flash_attention()` on TensorFlow: Keras's layers, in memory that grows with the length."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.attention import blockwise

LENGTH, TOKENS = 10, 20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in a short sequence; the calls of `attention`."""
    calls, stock = [], blockwise.attention

    def attention(*args, **more):
        calls.append(more)
        return stock(*args, **{"block": 4, **more})

    monkeypatch.setattr(blockwise, "attention", attention)
    yield calls
    keras.config.disable_flash_attention()


class Own(keras.layers.Layer):
    def __init__(self, dropout):
        super().__init__()
        self.attention = layer("heads", dropout)

    def call(self, query, value, use_causal_mask=False):
        return self.attention(query, value, use_causal_mask=use_causal_mask)


def layer(kind, dropout=0.0):
    if kind == "own":
        return Own(dropout)
    if kind == "grouped":
        return keras.layers.GroupQueryAttention(4, 4, 2, dropout=dropout)
    return keras.layers.MultiHeadAttention(2, 4, dropout=dropout)


def trained(kind="heads", *, flash, causal=True, mask=True, dropout=0.0, replicas=1, **compiled):
    random = np.random.default_rng(0)
    x, y = random.integers(1, TOKENS, (12, LENGTH)), random.normal(size=(12, LENGTH, 3)).astype("float32")
    x[::2, 7:] = 0
    devices = [f"CPU:{at}" for at in range(replicas)]
    with tfgpu.strategy("mirrored" if replicas > 1 else "one_device", devices=devices).scope():
        (keras.config.enable_flash_attention if flash else keras.config.disable_flash_attention)()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((LENGTH,), dtype="int32")
        hidden = keras.layers.Embedding(TOKENS, 8, mask_zero=mask)(inputs)
        hidden = layer(kind, dropout)(hidden, hidden, use_causal_mask=causal)
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(0.5), "mse", **compiled)
    model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([each.ravel() for each in model.get_weights()])


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["heads", "grouped"])
def test_layers_learn_what_they_learn_without_it(kind, causal, mask, small_blocks):
    how = {"causal": causal, "mask": mask}
    expected = trained(kind, flash=False, **how)
    assert not small_blocks
    np.testing.assert_allclose(trained(kind, flash=True, **how), expected, atol=1e-6)
    assert small_blocks


@pytest.mark.slow
def test_compiled_by_xla():
    np.testing.assert_allclose(trained(flash=True, jit_compile=True), trained(flash=False, jit_compile=True), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("kind", ["heads", "grouped", "own"])
def test_replicas_are_one_device_with_dropout(kind, replicas, caplog):
    """An own layer is tried on other rows than the replica's: the backward pass draws for them too."""
    expected = trained(kind, flash=True, dropout=0.3)
    np.testing.assert_allclose(trained(kind, flash=True, dropout=0.3, replicas=replicas), expected, atol=1e-6)
    assert "mixes rows" not in caplog.text


def test_a_function_takes_it_by_its_argument_and_by_the_setting(small_blocks):
    tfgpu.repair_keras()
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 9, 2, 4)), tf.float32)
    plain = keras.ops.dot_product_attention(x, x, x, is_causal=True)
    assert not small_blocks
    np.testing.assert_array_equal(keras.ops.dot_product_attention(x, x, x, is_causal=True, flash_attention=True), plain)
    keras.config.enable_flash_attention()
    np.testing.assert_array_equal(keras.ops.dot_product_attention(x, x, x, is_causal=True), plain)
    keras.ops.dot_product_attention(x, x, x, flash_attention=False)
    assert len(small_blocks) == 2


def test_scores_are_given_where_they_are_asked_for(small_blocks):
    tfgpu.repair_keras()
    keras.config.enable_flash_attention()
    attention, x = layer("heads"), tf.ones([2, 5, 8])
    output, scores = attention(x, x, use_causal_mask=True, return_attention_scores=True)
    assert scores.shape == (2, 2, 5, 5) and not small_blocks
    np.testing.assert_allclose(attention(x, x, use_causal_mask=True), output, atol=1e-6)
    assert small_blocks


def test_a_class_with_its_own_attention_keeps_it(small_blocks):
    tfgpu.repair_keras()
    keras.config.enable_flash_attention()
    seen = []

    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, attention_mask=None, *args, **more):
            seen.append(attention_mask)
            return query, None

    x = tf.ones([2, 5, 8])
    Own(2, 4)(x, x, use_causal_mask=True)
    assert seen[-1].shape[-2:] == (5, 5) and not small_blocks
