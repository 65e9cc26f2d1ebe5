"""Models that are trained on parts of each sequence, and on one device to compare with."""

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.parallel import apply

LENGTH, TOKENS, WIDTH = 16, 11, 8
LAYERS, CONFIG = keras.layers, keras.config


class Positions(LAYERS.Layer):
    """Adds learned positions by code of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, shape[-1]), name="table")

    def call(self, x, start_index=0):
        return x + self.table[start_index : start_index + x.shape[1]]


class Placed(LAYERS.Layer):
    """Says where the positions begin, as KerasHub's blocks do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.positions = Positions()

    def build(self, shape):
        self.positions.build(shape)

    def call(self, x):
        return self.positions(x, start_index=0)


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


class Picked(LAYERS.Layer):
    """The positions of given numbers, alone."""

    def call(self, x, at):
        return tf.gather(x, at, axis=1, batch_dims=1)


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
    return Block()(Block()(Placed()(LAYERS.Embedding(TOKENS, WIDTH)(x))))


def mixing(x):
    x = LAYERS.Conv1D(WIDTH, 3, padding="causal")(LAYERS.Embedding(TOKENS, WIDTH)(x))
    x = LAYERS.Dropout(0.2)(Last()(x))
    return x + LAYERS.LSTM(WIDTH, return_sequences=True)(x)


def pooled(x):
    x = LAYERS.GlobalAveragePooling1D()(transformer(x, dropout=0.0))
    return LAYERS.Dropout(0.3)(LAYERS.Dense(LENGTH // 4, "relu")(x))


def picked(x):
    """Of each sequence the two positions that its first numbers give."""
    return Picked()(transformer(x, mask=False), x[:, :2])


def regularized(x):
    x = LAYERS.Dense(WIDTH, activity_regularizer=keras.regularizers.L2(0.01))(transformer(x))
    return LAYERS.ActivityRegularization(0.01)(x)


BODIES = {
    "transformer": transformer,
    "own": own,
    "mixing": mixing,
    "pooled": pooled,
    "picked": picked,
    "regularized": regularized,
}


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


def data_of(kind):
    """Ten rows, every second one padded."""
    random = np.random.default_rng(0)
    x = random.integers(1, TOKENS, (10, LENGTH))
    x[::2, 11:] = 0
    y = random.integers(0, TOKENS, {"pooled": 10, "picked": (10, 2)}.get(kind, (10, LENGTH)))
    return x, y, random.uniform(size=y.shape).astype("float32")


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
    x, y, each = data_of(kind)
    given = {"sample_weight": each} if weights else {}
    logs = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **given).history
    evaluated = model.evaluate(x, y, batch_size=4, verbose=0, **given)
    return [*model.get_weights(), *map(np.array, logs.values()), np.array(evaluated), model.predict(x, verbose=0)]


def check_equal(found, expected, atol=1e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=atol)
