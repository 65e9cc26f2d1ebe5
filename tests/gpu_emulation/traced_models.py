"""The models of the table: small, with sizes that are no multiple of 13, the rows of a replica."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfgpu

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


def blocks():
    """A language model with a block of the user's own, which has a plan, and one table for words and logits."""
    inputs = keras.Input((6,), dtype="int32")
    table = layers.ReversibleEmbedding(40, 8)
    return (
        keras.Model(inputs, table(Block(name="block")(table(inputs)), reverse=True)),
        dict(SPARSE),
        lambda n: (labels((n, 6), 40), labels((n, 6), 40)),
    )


@keras.saving.register_keras_serializable("traced")
class Block(layers.Layer):
    """Attention and a gated feed-forward."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention, self.norm = layers.MultiHeadAttention(2, 4), layers.RMSNormalization()
        self.gate, self.up, self.down = layers.Dense(16, "silu"), layers.Dense(16), layers.Dense(8)

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.norm, self.gate, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x):
        x = x + self.attention(x, x, use_causal_mask=True)
        normed = self.norm(x)
        return x + self.down(self.gate(normed) * self.up(normed))


tfgpu.parallel.register_plan(Block, {"gate": "column", "up": "column", "down": "row"})


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


def recurrent():
    """Recurrent layers, whose loops have gradients."""
    inputs = keras.Input((7,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(40, 8)(inputs))
    outputs = layers.Dense(3, dtype="float32")(layers.GRU(8)(x))
    return keras.Model(inputs, outputs), dict(SPARSE), lambda n: (labels((n, 7), 40), labels(n, 3))


def scores():
    """Several labels a row, with weights of rows, and metrics that count thresholds."""
    inputs = keras.Input((8,))
    outputs = layers.Dense(5, "sigmoid", dtype="float32")(layers.Dense(16, "relu")(inputs))
    counted = [keras.metrics.AUC(multi_label=True, num_labels=5), keras.metrics.F1Score(threshold=0.5)]
    compiling = {"loss": "binary_crossentropy", "metrics": counted, "weighted_metrics": [keras.metrics.Precision()]}

    def data(n):
        return image(n, 8), labels((n, 5), 2).astype("float32"), labels(n, 4).astype("float32")

    return keras.Model(inputs, outputs), compiling, data


def circle():
    """Keras's loss that compares rows by their labels."""
    inputs = keras.Input((8,))
    outputs = layers.UnitNormalization(dtype="float32")(layers.Dense(4)(inputs))
    return keras.Model(inputs, outputs), {"loss": keras.losses.Circle()}, lambda n: (image(n, 8), labels(n, 3))


def padded():
    """Ragged token numbers, padded to the longest row before an embedding with a mask."""
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    dense = Padded(dtype="int64")(inputs)
    x = layers.GlobalAveragePooling1D()(layers.Embedding(40, 8, mask_zero=True)(dense))
    outputs = layers.Dense(3, dtype="float32")(x)
    return keras.Model(inputs, outputs), dict(SPARSE), lambda n: (ragged(n, 40), labels(n, 3))


@tfgpu.by_rows
class Padded(layers.Layer):
    """Ragged rows as a dense tensor."""

    def call(self, rows):
        return rows.to_tensor() if isinstance(rows, tf.RaggedTensor) else rows

    def compute_output_spec(self, rows):
        return keras.KerasTensor(rows.shape, rows.dtype)


def bags():
    """Ragged token numbers, whose vectors are averaged by row, without padding."""
    return Bags(), dict(SPARSE), lambda n: (ragged(n, 40), labels(n, 3))


@tfgpu.by_rows
class Bags(keras.Model):
    """Classes by the mean of each row's vectors."""

    def __init__(self):
        super().__init__()
        self.table, self.head = layers.Embedding(40, 8), layers.Dense(3, dtype="float32")
        self.table.build(None)
        self.head.build((None, 8))
        self.built = True

    def call(self, rows):
        return self.head(tf.reduce_mean(tf.ragged.map_flat_values(self.table, rows), 1))


def padded_vectors():
    """Ragged vectors, such as the output of a GPU's layer, padded after it."""
    return PaddedVectors(), dict(SPARSE), lambda n: (ragged(n, 40), labels(n, 3))


@tfgpu.by_rows
class PaddedVectors(Bags):
    """Classes by the largest of each row's vectors."""

    def call(self, rows):
        return self.head(tf.reduce_max(tf.ragged.map_flat_values(self.table, rows).to_tensor(), 1))


def sparse():
    """Sparse numbers before a dense layer."""
    inputs = keras.Input((20,), sparse=True)
    outputs = layers.Dense(3, dtype="float32")(layers.Dense(16, "relu")(inputs))

    def data(n):
        values = image(n, 20)
        return tf.sparse.from_dense(np.where(values > 0.5, values, 0)), labels(n, 3)

    return keras.Model(inputs, outputs), dict(SPARSE), data


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


def experts():
    """A mixture of experts."""
    inputs = keras.Input((6, 8))
    x = inputs + tfgpu.layers.MixtureOfExperts(4, 12)(inputs)
    outputs = layers.Dense(3, dtype="float32")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), dict(SPARSE), lambda n: (image(n, 6, 8), labels(n, 3))


def ragged(rows: int, count: int) -> tf.RaggedTensor:
    """Made-up whole numbers above 0, up to six a row."""
    lengths = np.random.default_rng(2).integers(1, 7, rows)
    values = 1 + np.random.default_rng(1).integers(0, count - 1, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(values, lengths)


_ALL = cnn, language, blocks, embeddings, two_outputs, own_loss, gan, recurrent, scores, circle
_ALL += padded, bags, padded_vectors, sparse, experts
MODELS: dict[str, Callable] = {each.__name__: each for each in _ALL}
"""Each makes a model, what `compile` takes besides the optimizer, and the data of so many rows."""
