"""Rows of data and small models for the cases of the equivalence matrix."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import optimizers as O


def numbers(rows, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)


def weighted(rows):
    x, y = numbers(rows)
    return x, y, (np.arange(rows) % 7 / 3).astype("float32")


def half_weightless(rows):
    x, y = numbers(rows)
    return x, y, (np.arange(rows) % 8 < 3).astype("float32")


def values(rows):
    x, y = numbers(rows)
    return x, np.tanh(x @ np.ones((6, 2), "float32") + y[:, None])


def binary(rows):
    x, y = numbers(rows)
    return x, (x[:, :2] > 0.3).astype("float32")


def one_hot(rows):
    x, y = numbers(rows)
    return x, np.eye(3, dtype="float32")[y]


def images(rows):
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 8, 8, 1)).astype("float32") + np.linspace(0, 1, rows)[:, None, None, None].astype(
        "float32"
    ), rng.integers(0, 3, rows)


def sequences(rows):
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 5, 4)).astype("float32"), rng.integers(0, 3, rows)


def tokens(rows):
    """Padded with 0 to very different lengths: a replica may see 2 words while another sees 14."""
    rng = np.random.default_rng(3)
    length = 1 + (np.arange(rows) * 5) % 7
    return np.where(np.arange(7) < length[:, None], rng.integers(1, 20, (rows, 7)), 0), rng.integers(0, 3, rows)


def tagged(rows):
    return tokens(rows)[0], np.random.default_rng(4).integers(0, 3, (rows, 7))


def tagged_weighted(rows):
    return *tagged(rows), (np.arange(rows * 7).reshape(rows, 7) % 5 / 2).astype("float32")


def dictionary(rows):
    x, y = numbers(rows)
    return {"a": x[:, :2], "b": x[:, 2:]}, y


def nested(rows):
    x, y = numbers(rows)
    return {"a": x[:, :2], "more": (x[:, 2:4], x[:, 4:])}, y


def two_targets(rows):
    x, y = numbers(rows)
    return x, {"kind": y, "size": x[:, :1] * 2}


def overflowing(*where):
    """Rows that overflow float16 at these places of the second batch of 8 (and so on single replicas)."""

    def make(rows):
        x, y = numbers(rows)
        x = x.copy()
        x[[8 + i for i in where]] = 6e4
        return x, y

    return make


def sequential(shape, *stack, dtype=None):
    return lambda: keras.Sequential([keras.Input(shape, dtype=dtype), *[make() for make in stack]])


def dense(*between, last=3, **options):
    """A small network on 6 numbers; tanh has no kink that would amplify rounding."""
    return sequential((6,), lambda: L.Dense(8, "tanh", **options), *between, lambda: L.Dense(last, dtype="float32"))


def shares():
    """Ends in three shares from 0 to 1, for losses on probabilities."""
    return sequential((6,), lambda: L.Dense(8, "tanh"), lambda: L.Dense(3, "sigmoid"))


def conv(*between):
    return sequential(
        (8, 8, 1),
        *between,
        lambda: L.Conv2D(4, 3, activation="tanh"),
        lambda: L.MaxPooling2D(),
        lambda: L.Flatten(),
        lambda: L.Dense(3),
    )


def recurrent(make):
    return sequential((5, 4), make, lambda: L.Dense(3))


def words(*stack, mask=True):
    return sequential((7,), lambda: L.Embedding(20, 4, mask_zero=mask), *stack, lambda: L.Dense(3), dtype="int32")


def functional(inputs, join):
    def make():
        tensors = inputs()
        return keras.Model(tensors, join(tensors))

    return make


def dict_inputs():
    return {"a": keras.Input((2,), name="a"), "b": keras.Input((4,), name="b")}


def nested_inputs():
    return {"a": keras.Input((2,)), "more": (keras.Input((2,)), keras.Input((2,)))}


def joined(t):
    return L.Dense(3)(L.Dense(8, "tanh")(L.Concatenate()(keras.tree.flatten(t))))


def two_heads():
    x = keras.Input((6,))
    h = L.Dense(8, "tanh")(x)
    return keras.Model(x, {"kind": L.Dense(3, name="kind")(h), "size": L.Dense(1, name="size")(h)})


def unused_layer():
    model = dense()()
    model.spare = L.Dense(2)
    model.spare.build((None, 3))
    return model


class Adds(L.Layer):
    """Adds a loss: the mean of the batch's squares."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Noise(L.Layer):
    """Draws through keras.random with a seed of its own."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        return x * keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, seed=self.seed) if training else x


class Counter(L.Layer):
    """Keeps a running mean of what it sees, and a count of steps, as layers with a state of their own do."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            self.steps.assign_add(1.0)
        return x - self.mean


def wired(**members):
    """A subclass of keras.Model around two lazily built layers, with other methods of its own."""

    class Wired(keras.Model):
        def __init__(self):
            super().__init__()
            self.stack = [L.Dense(8, "tanh"), L.Dense(3)]
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x, training=False):
            for layer in self.stack:
                x = layer(x)
            return x

    for name, member in members.items():
        setattr(Wired, name, member)
    return Wired


def own_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    self.seen.update_state(loss)
    return {"seen": self.seen.result(), "now": loss}


def scalar_step(self, data):
    """As in Keras's guide "customizing what happens in fit": a mean of its own, its own trackers."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True))
    self.optimizer.apply_gradients(
        zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
    )
    self.seen.update_state(loss)
    return {"seen": self.seen.result()}


def own_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return keras.ops.mean(keras.ops.square(y_pred - 1.0)) + keras.ops.mean(keras.ops.abs(y_pred))


class Gan(keras.Model):
    """Two optimizers in one step."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = dense(last=6)(), dense(last=1)()
        self.second = O.Adam(0.01)

    def call(self, x):
        return self.judge(self.maker(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            made = self.judge(self.maker(x))
            real = self.judge(x)
            judged = keras.ops.mean(keras.ops.softplus(made) + keras.ops.softplus(-real))
            fooled = keras.ops.mean(keras.ops.softplus(-made))
        for optimizer, part, loss in (
            (self.optimizer, self.judge, judged),
            (self.second, self.maker, fooled),
        ):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"judged": judged, "fooled": fooled}


def attention(rate):
    x = keras.Input((5, 4))
    h = L.MultiHeadAttention(2, 3, dropout=rate)(x, x)
    return keras.Model(x, L.Dense(3)(L.Flatten()(h)))


def smooth(y, p):
    return keras.ops.mean(keras.ops.square(p - y), axis=-1)


def scalar(y, p):
    return keras.ops.mean(keras.ops.square(p - y))


class OwnLoss(keras.losses.Loss):
    def call(self, y, p):
        return keras.ops.sum(keras.ops.abs(p - y), axis=-1)
