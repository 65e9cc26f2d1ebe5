"""The models of the table: small, with sizes that are no multiple of 13, the rows of a replica."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
ROWS = 13
"""Rows of a replica: a prime number, so that a tensor whose size it divides has a row for each example."""
SPARSE = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}


def cnn():
    """Convolution, BatchNormalization twice, accuracy."""
    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs)))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
    outputs = layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), dict(SPARSE), lambda n: (image(n), labels(n, 10))


def language():
    """A causal language model: embedding, attention, logits over the vocabulary, accuracy."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(40, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    outputs = layers.Dense(40, dtype="float32")(x)
    return keras.Model(inputs, outputs), dict(SPARSE), lambda n: (labels((n, 6), 40), labels((n, 6), 40))


def embeddings():
    """Two tables of embeddings: sparse gradients."""
    users, items = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="item")
    x = layers.Concatenate()([layers.Embedding(50, 4)(users), layers.Embedding(30, 4)(items)])
    outputs = layers.Dense(1, dtype="float32")(x)

    def data(n):
        return {"user": labels(n, 50), "item": labels(n, 30)}, image(n, 1)

    return keras.Model([users, items], outputs), {"loss": keras.losses.MeanSquaredError()}, data


def two_outputs():
    """Two outputs, with a loss and a metric each."""
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="relu")(inputs)
    kind, size = layers.Dense(5, dtype="float32", name="kind")(x), layers.Dense(1, dtype="float32", name="size")(x)
    compiling = {
        "loss": {"kind": SPARSE["loss"], "size": "mse"},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    }
    model = keras.Model(inputs, {"kind": kind, "size": size})
    return model, compiling, lambda n: (image(n, 8), {"kind": labels(n, 5), "size": image(n, 1)})


def own_loss():
    """A loss of the user's own that looks at pairs of rows."""

    def pairwise(y_true, y_pred):
        apart = y_pred - tf.transpose(y_pred)
        wanted = tf.sign(y_true - tf.transpose(y_true))
        return tf.reduce_mean(tf.nn.relu(1.0 - wanted * apart), axis=1)

    inputs = keras.Input((8,))
    outputs = layers.Dense(1, dtype="float32")(layers.Dense(16, activation="relu")(inputs))
    return keras.Model(inputs, outputs), {"loss": pairwise}, lambda n: (image(n, 8), image(n, 1))


def gan():
    """A `train_step` of the user's own, with two optimizers."""
    return Gan(), {"second": keras.optimizers.Adam(0.01)}, lambda n: (image(n, 8),)


class Gan(keras.Model):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(8)])
        self.discriminator = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(1)
        self.meter = keras.metrics.Mean(name="loss")

    def compile(self, optimizer, second, **options):
        super().compile(optimizer=optimizer, **options)
        self.second = second
        self.second.build(self.discriminator.trainable_variables)
        self.optimizer.build(self.generator.trainable_variables)

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, data):
        (real,) = data if isinstance(data, tuple) else (data,)
        noise = keras.random.normal((tf.shape(real)[0], 4), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(noise, training=True)
            judged, seen = self.discriminator(made, training=True), self.discriminator(real, training=True)
            lost = tf.reduce_mean(tf.nn.softplus(-judged))
            found = tf.reduce_mean(tf.nn.softplus(judged) + tf.nn.softplus(-seen))
        for optimizer, loss, network in (
            (self.optimizer, lost, self.generator),
            (self.second, found, self.discriminator),
        ):
            gradients = tape.gradient(loss, network.trainable_variables)
            optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
        self.meter.update_state(lost + found)
        return {"loss": self.meter.result()}


def image(rows: int, *shape: int) -> np.ndarray:
    """Made-up numbers, a row an example."""
    return np.random.default_rng(0).normal(size=(rows, *(shape or (8, 8, 3)))).astype("float32")


def labels(shape, count: int) -> np.ndarray:
    """Made-up whole numbers."""
    return np.random.default_rng(1).integers(0, count, shape).astype("int32")


MODELS: dict[str, Callable] = {each.__name__: each for each in (cnn, language, embeddings, two_outputs, own_loss, gan)}
"""Each makes a model, what `compile` takes besides the optimizer, and the data of so many rows."""
