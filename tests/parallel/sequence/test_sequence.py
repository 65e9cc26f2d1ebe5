"""`Mesh(sequence=n)`: parts of each sequence on several devices learn what one device learns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from benchmarks.sequence import kept_bytes
from tfgpu.parallel import Mesh, apply

LENGTH, TOKENS, WIDTH = 16, 11, 8
LAYERS, CONFIG = keras.layers, keras.config


class Positions(LAYERS.Layer):
    """Adds learned positions by code of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, shape[-1]), name="table")

    def call(self, x, start_index=0):
        return x + self.table[start_index : start_index + x.shape[1]]


class Block(LAYERS.Layer):
    """A block of a user's, around Keras's layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm, self.attention = LAYERS.RMSNormalization(), LAYERS.GroupQueryAttention(4, 2, 1, dropout=0.2)
        self.drop, self.dense = LAYERS.Dropout(0.3), LAYERS.Dense(WIDTH, "tanh")

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.dense.build(shape)

    def call(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.drop(self.dense(x))


class Last(LAYERS.Layer):
    """Adds to each position the one before it: mixes positions."""

    def call(self, x):
        return x + tf.roll(x, 1, 1)


def transformer(x, *, mask=True, dropout=0.2):
    x = LAYERS.Embedding(TOKENS, WIDTH, mask_zero=mask)(x)
    y = LAYERS.LayerNormalization()(x)
    x = x + LAYERS.Dropout(dropout)(LAYERS.MultiHeadAttention(2, 4, dropout=dropout)(y, y, use_causal_mask=True))
    y = LAYERS.Dense(16, "gelu")(LAYERS.LayerNormalization()(x))
    return x + LAYERS.Dropout(dropout)(LAYERS.Dense(WIDTH)(y))


def own(x):
    return Block()(Block()(Positions()(LAYERS.Embedding(TOKENS, WIDTH)(x))))


def mixing(x):
    x = LAYERS.Conv1D(WIDTH, 3, padding="causal")(LAYERS.Embedding(TOKENS, WIDTH)(x))
    x = LAYERS.Dropout(0.2)(Last()(x))
    return x + LAYERS.LSTM(WIDTH, return_sequences=True)(x)


def pooled(x):
    x = LAYERS.GlobalAveragePooling1D()(transformer(x, dropout=0.0))
    return LAYERS.Dropout(0.3)(LAYERS.Dense(LENGTH // 4, "relu")(x))


BODIES = {"transformer": transformer, "own": own, "mixing": mixing, "pooled": pooled}


class Subclassed(keras.Model):
    """A model whose `call` is Python code."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = LAYERS.Embedding(TOKENS, WIDTH), Block(), LAYERS.Dense(TOKENS)

    def call(self, x):
        return self.head(self.block(self.table(x)) * 2)


def model_of(kind):
    keras.utils.set_random_seed(0)
    if kind == "subclassed":
        model = Subclassed()
        model(np.zeros((2, LENGTH), "int32"))
        return model
    inputs = keras.Input((LENGTH,), dtype="int32")
    return keras.Model(inputs, LAYERS.Dense(TOKENS)(BODIES[kind](inputs)))


def trained(kind, mesh=None, *, optimizer=None, loss=None, weights=False, **compiled):
    """Weights, logs, what `evaluate` and `predict` give; the last batch has two rows."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    make = optimizer or (lambda: keras.optimizers.SGD(0.3))
    if mesh is None:
        with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
            model = model_of(kind)
            model.compile(make(), loss, metrics=["accuracy"], **compiled)
    else:
        model = apply(model_of(kind), mesh)
        model.compile(make(), loss, metrics=["accuracy"], **compiled)
    random = np.random.default_rng(0)
    x = random.integers(1, TOKENS, (10, LENGTH))
    x[::2, 11:] = 0
    y = random.integers(0, TOKENS, 10 if kind == "pooled" else (10, LENGTH))
    given = {"sample_weight": random.uniform(size=y.shape).astype("float32")} if weights else {}
    logs = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **given).history
    evaluated = model.evaluate(x, y, batch_size=4, verbose=0, **given)
    return [*model.get_weights(), *map(np.array, logs.values()), np.array(evaluated), model.predict(x, verbose=0)]


def check_equal(found, expected, atol=1e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [Mesh(sequence=2), Mesh(sequence=4), Mesh(data=2, sequence=2)], ids=("two", "four", "two by two")
)
@pytest.mark.parametrize("kind", [*BODIES, "subclassed"])
def test_parts_of_a_sequence_learn_what_one_device_learns(kind, mesh, caplog):
    check_equal(trained(kind, mesh), trained(kind))
    mixes = {record.args[0] for record in caplog.records if "mixes positions" in record.msg}
    assert mixes == ({"Last"} if kind == "mixing" else set())


def clipped():
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["clipped, accumulated", "weights", "blocks", "chunks", "float16"])
def test_with_other_settings(how):
    given = {"weights": {"weights": True}, "clipped, accumulated": {"optimizer": clipped}}.get(how, {})
    if how == "chunks":
        given["loss"] = tfgpu.losses.ChunkedCrossentropy(5)
    try:
        (CONFIG.enable_flash_attention if how == "blocks" else CONFIG.disable_flash_attention)()
        CONFIG.set_dtype_policy("mixed_float16" if how == "float16" else "float32")
        found, expected = trained("transformer", Mesh(sequence=2), **given), trained("transformer", **given)
    finally:
        CONFIG.disable_flash_attention()
        CONFIG.set_dtype_policy("float32")
    if how == "float16":  # one token of another class, by rounding, is more than that
        check_equal(found[:-4], expected[:-4], 5e-3)
    else:
        check_equal(found, expected)


@pytest.mark.slow
def test_a_device_keeps_a_part_of_the_activations():
    sizes = {"length": 64, "width": 32, "heads": 2, "depth": 2, "batch": 2}
    devices = [f"CPU:{at}" for at in range(4)]
    (whole,) = kept_bytes(Mesh(devices=devices[:1]), **sizes).values()
    parts = kept_bytes(Mesh(sequence=4, devices=devices), **sizes)
    assert len(parts) == 4
    assert max(parts.values()) <= 0.3 * whole, (whole, parts)


@pytest.mark.sample("axes")
@pytest.mark.parametrize(
    ("mesh", "length", "message"),
    [
        (Mesh(sequence=3), 16, "16 positions does not divide into 3 parts. Use a length of 15 or 18"),
        (Mesh(sequence=2, tensor=2), 16, "`sequence` goes with `data` alone"),
    ],
    ids=("length", "axes"),
)
def test_what_does_not_fit_is_named(mesh, length, message):
    inputs = keras.Input((length, 4))
    model = keras.Model(inputs, LAYERS.Dense(2)(inputs))
    with pytest.raises(tfgpu.InputError, match=message.replace("`", ".")):
        model = apply(model, mesh)
        model.compile("sgd", "mse")
        model.fit(np.ones((4, length, 4)), np.ones((4, length, 2)), verbose=0)


def test_xla_is_refused():
    model = apply(keras.Sequential([keras.Input((16, 4)), LAYERS.Dense(2)]), Mesh(sequence=2))
    with pytest.raises(tfgpu.InputError, match="XLA can compile neither this model's step nor the calls"):
        model.compile("sgd", "mse", jit_compile=True)


@pytest.mark.slow
def test_a_loss_of_activations_is_refused():
    inputs = keras.Input((4, 4))
    model = apply(keras.Model(inputs, LAYERS.ActivityRegularization(0.1)(inputs)), Mesh(sequence=2))
    model.compile("sgd", "mse")
    with pytest.raises(tfgpu.InputError, match="adds a loss of its activations"):
        model.fit(np.ones((4, 4, 4)), np.ones((4, 4, 4)), verbose=0)
