"""Language models, taggers and recognizers, small, as other people write them."""

import keras
import numpy as np
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import tagged, tokens

WORDS, LENGTH, WIDTH = 20, 7, 8


class WordsAndPositions(L.Layer):
    """Looks up words and positions; its table of words is also the last layer of a language model."""

    def __init__(self, mask_zero=False):
        super().__init__()
        self.words, self.positions = L.Embedding(WORDS, WIDTH, mask_zero=mask_zero), L.Embedding(LENGTH, WIDTH)

    def build(self, shape):
        self.words.build(shape)
        self.positions.build((LENGTH,))

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(ops.shape(x)[1]))

    def compute_mask(self, x, mask=None):
        return self.words.compute_mask(x)


class Waves(L.Layer):
    """Adds sine waves of the positions, which it computes once."""

    def build(self, shape):
        at, each = np.arange(shape[1])[:, None], np.arange(shape[2])[None]
        angles = at / 10000 ** (2 * (each // 2) / shape[2])
        self.waves = ops.convert_to_tensor(np.where(each % 2, np.cos(angles), np.sin(angles)), "float32")
        self.supports_masking = True

    def call(self, x):
        return x + self.waves


class Block(L.Layer):
    """A transformer's block that normalizes first."""

    def __init__(self, causal=False, drop=0.0):
        super().__init__()
        self.causal, self.supports_masking = causal, True
        self.attend, self.drop = L.MultiHeadAttention(2, 4), L.Dropout(drop, seed=3)
        self.norms = [L.LayerNormalization(), L.LayerNormalization()]
        self.dense = keras.Sequential([L.Dense(12, "gelu"), L.Dense(WIDTH)])

    def build(self, shape):
        self.attend.build(shape, shape)
        for part in (*self.norms, self.dense):
            part.build(shape)

    def call(self, x, training=False):
        inner = self.norms[0](x)
        inner = self.attend(inner, inner, use_causal_mask=self.causal)
        x = x + self.drop(inner, training=training)
        return x + self.drop(self.dense(self.norms[1](x)), training=training)


class TiedHead(L.Layer):
    """Words at the masked positions, by the table that looked the words up."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.dense, self.norm = embedding, L.Dense(WIDTH, "gelu"), L.LayerNormalization()

    def build(self, x_shape, positions_shape):
        self.dense.build(x_shape)
        self.norm.build(x_shape)
        self.bias = self.add_weight(shape=(WORDS,), initializer="zeros", name="bias")

    def call(self, x, positions):
        x = ops.take_along_axis(x, positions[:, :, None], axis=1)
        x = self.norm(self.dense(x))
        return ops.matmul(x, ops.transpose(self.embedding.words.embeddings)) + self.bias


def bert():
    given = {
        "ids": keras.Input((LENGTH,), dtype="int32", name="ids"),
        "positions": keras.Input((3,), dtype="int32", name="positions"),
    }
    look = WordsAndPositions(mask_zero=True)
    x = Block(drop=0.1)(L.LayerNormalization()(look(given["ids"])))
    return keras.Model(given, TiedHead(look)(x, given["positions"]))


def masked_words(rows):
    ids, rng = tokens(rows)[0], np.random.default_rng(5)
    positions = np.sort(rng.permuted(np.tile(np.arange(LENGTH), (rows, 1)), axis=1)[:, :3])
    words = np.take_along_axis(ids, positions, 1)
    hidden = ids.copy()
    np.put_along_axis(hidden, positions, np.where(words > 0, WORDS - 1, 0), 1)
    return {"ids": hidden, "positions": positions}, words, (words > 0).astype("float32")


def gpt():
    x = given = keras.Input((LENGTH,), dtype="int32")
    x = Waves()(L.Embedding(WORDS, WIDTH, mask_zero=True)(x))
    x = Block(causal=True)(Block(causal=True)(x))
    return keras.Model(given, L.Dense(WORDS, use_bias=False)(L.LayerNormalization()(x)))


def next_words(rows):
    ids = tokens(rows)[0]
    following = np.concatenate([ids[:, 1:], np.zeros((rows, 1), ids.dtype)], 1)
    return ids, following, (following > 0).astype("float32")


def next_words_unweighted(rows):
    return next_words(rows)[:2]


class RelativeAttention(L.Layer):
    """Attention with a bias for each distance and head, as in T5; no scale and no bias elsewhere."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.all = L.Dense(3 * WIDTH, use_bias=False)
        self.table = L.Embedding(5, heads)

    def build(self, shape):
        self.all.build(shape)
        self.table.build((shape[1], shape[1]))

    def call(self, x):
        length = ops.shape(x)[1]
        apart = ops.arange(length)[None] - ops.arange(length)[:, None]
        bias = ops.transpose(self.table(ops.clip(apart, -2, 2) + 2), (2, 0, 1))
        parts = ops.reshape(self.all(x), (-1, length, 3, self.heads, WIDTH // self.heads))
        query, key, value = (ops.transpose(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
        scores = ops.softmax(ops.matmul(query, ops.swapaxes(key, -1, -2)) + bias)
        return ops.reshape(ops.transpose(ops.matmul(scores, value), (0, 2, 1, 3)), (-1, length, WIDTH))


class RootMeanSquare(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        power = ops.mean(ops.square(ops.cast(x, "float32")), axis=-1, keepdims=True)
        return x * ops.cast(ops.rsqrt(power + 1e-6), x.dtype) * self.scale


def t5():
    x = given = keras.Input((LENGTH,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH)(x)
    for _ in range(2):
        x = x + RelativeAttention()(RootMeanSquare()(x))
    return keras.Model(given, L.Dense(WORDS)(RootMeanSquare()(x)))


class RotaryAttention(L.Layer):
    """Causal attention, two heads to one key, whose queries and keys are turned by their position."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (L.Dense(n, use_bias=False) for n in (WIDTH, WIDTH // 2, WIDTH // 2))
        self.out = L.Dense(WIDTH, use_bias=False)

    def build(self, shape):
        for part in (self.query, self.key, self.value, self.out):
            part.build(shape)

    def turn(self, x):
        half = ops.shape(x)[-1] // 2
        speeds = 10000.0 ** (-ops.arange(half, dtype="float32") / half)
        angles = ops.arange(ops.shape(x)[1], dtype="float32")[:, None, None] * speeds
        a, b = ops.split(x, 2, axis=-1)
        sine, cosine = ops.sin(angles), ops.cos(angles)
        return ops.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    def call(self, x):
        batch, length = ops.shape(x)[0], ops.shape(x)[1]
        query = self.turn(ops.reshape(self.query(x), (batch, length, 2, 4)))
        key = ops.repeat(self.turn(ops.reshape(self.key(x), (batch, length, 1, 4))), 2, axis=2)
        value = ops.repeat(ops.reshape(self.value(x), (batch, length, 1, 4)), 2, axis=2)
        out = ops.dot_product_attention(query, key, value, is_causal=True)
        return self.out(ops.reshape(out, (batch, length, WIDTH)))


class GatedDense(L.Layer):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = L.Dense(12, "silu"), L.Dense(12), L.Dense(WIDTH)

    def build(self, shape):
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 12))

    def call(self, x):
        return self.down(self.gate(x) * self.up(x))


class Llama(keras.Model):
    """A backbone of layers that a loop calls."""

    def __init__(self):
        super().__init__()
        self.embed = L.ReversibleEmbedding(WORDS, WIDTH)
        self.attend, self.dense = [RotaryAttention() for _ in range(2)], [GatedDense() for _ in range(2)]
        self.norms, self.norm = [RootMeanSquare() for _ in range(4)], RootMeanSquare()

    def call(self, x):
        x = self.embed(x)
        for i in range(2):
            x = x + self.attend[i](self.norms[2 * i](x))
            x = x + self.dense[i](self.norms[2 * i + 1](x))
        return self.embed(self.norm(x), reverse=True)


class Classifier(keras.Model):
    """A functional model inside a subclass, as a task around a backbone."""

    def __init__(self):
        given = keras.Input((LENGTH,), dtype="int32")
        encoded = Block(drop=0.2)(WordsAndPositions(mask_zero=True)(given))
        backbone = keras.Model(given, encoded, name="backbone")
        pooled = L.Dense(WIDTH, "tanh")(backbone(given)[:, 0])
        super().__init__(given, L.Dense(3)(L.Dropout(0.2, seed=8)(pooled)))
        self.backbone = backbone


def translator():
    source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    words = L.Embedding(WORDS, WIDTH, mask_zero=True)
    encoded, *state = L.LSTM(WIDTH, return_sequences=True, return_state=True)(words(source))
    decoded = L.LSTM(WIDTH, return_sequences=True)(L.Embedding(WORDS, WIDTH, mask_zero=True)(target), state)
    found = L.AdditiveAttention()([decoded, encoded])
    return keras.Model((source, target), L.Dense(WORDS)(L.Concatenate()([decoded, found])))


def translations(rows):
    ids, following, _ = next_words(rows)
    return (ids[:, ::-1].copy(), ids), following


def tagger():
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            L.Embedding(WORDS, WIDTH, mask_zero=True),
            L.Bidirectional(L.GRU(4, return_sequences=True)),
            L.TimeDistributed(L.Dense(3)),
        ]
    )


class FieldTagger(keras.Model):
    """A conditional random field: the loss is of whole paths, divided by the rows' words."""

    def __init__(self):
        super().__init__()
        self.embed, self.scores = L.Embedding(WORDS, WIDTH), L.Dense(3)
        self.field = self.add_weight(shape=(3, 3), name="field")

    def call(self, x):
        return self.scores(ops.tanh(self.embed(x)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        there = ops.cast(x > 0, "float32")
        chosen = ops.one_hot(y, 3)
        path = ops.sum(ops.sum(y_pred * chosen, -1) * there, 1)
        steps = ops.sum(ops.matmul(chosen[:, :-1], self.field) * chosen[:, 1:], -1)
        path = path + ops.sum(steps * there[:, 1:], 1)
        sums = y_pred[:, 0]
        for at in range(1, LENGTH):
            moved = ops.logsumexp(sums[:, :, None] + self.field + y_pred[:, at, None], axis=1)
            sums = ops.where(there[:, at, None] > 0, moved, sums)
        return ops.sum(ops.logsumexp(sums, axis=-1) - path) / ops.sum(there)


def spoken(rows):
    """Sounds, and spelled words of two or three letters."""
    x = np.random.default_rng(3).normal(size=(rows, 8, 4)).astype("float32")
    y = np.random.default_rng(4).integers(1, 4, (rows, 3))
    return x, np.where(np.arange(3) < 2 + np.arange(rows)[:, None] % 2, y, 0)


def alignment(y, p):
    """CTC as a function, with lengths by row."""
    lengths = ops.sum(ops.cast(y > 0, "int32"), axis=1)
    times = ops.full_like(lengths, ops.shape(p)[1])
    return ops.ctc_loss(y, p, lengths, times, mask_index=0)


def listener():
    x = given = keras.Input((8, 4))
    x = L.Conv1D(6, 3, padding="same", use_bias=False)(x)
    x = ops.silu(L.BatchNormalization()(x))
    x = L.Bidirectional(L.GRU(4, return_sequences=True))(x)
    return keras.Model(given, L.Dense(4)(x))


def wavenet():
    x = given = keras.Input((8, 4))
    x, skips = L.Conv1D(6, 2, padding="causal")(x), []
    for rate in (1, 2, 4):
        gate = L.Conv1D(6, 2, padding="causal", dilation_rate=rate, activation="sigmoid")(x)
        inner = gate * L.Conv1D(6, 2, padding="causal", dilation_rate=rate, activation="tanh")(x)
        x = x + L.Conv1D(6, 1)(inner)
        skips.append(L.Conv1D(6, 1)(inner))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling1D()(ops.tanh(L.Add()(skips)))))


def heard(rows):
    return spoken(rows)[0], tokens(rows)[1]


class Fourier(L.Layer):
    """Mixes words and features by a Fourier transform, as FNet does."""

    def call(self, x):
        return ops.fft2((x, ops.zeros_like(x)))[0]


def fnet():
    x = given = keras.Input((LENGTH,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH)(x)
    x = L.LayerNormalization()(x + Fourier()(x))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling1D()(x + L.Dense(WIDTH, "gelu")(x))))


class SkipGrams(keras.Model):
    """Words whose vectors lie near those of their context, and far from other words'."""

    def __init__(self):
        super().__init__()
        self.target, self.context = L.Embedding(WORDS, 4), L.Embedding(WORDS, 4)

    def call(self, pair):
        target, context = pair
        return ops.einsum("be,bce->bc", self.target(target), self.context(context))


def contexts(rows):
    rng = np.random.default_rng(3)
    return (rng.integers(0, WORDS, rows), rng.integers(0, WORDS, (rows, 4))), np.zeros(rows, "int64")


def perplexity(y, p):
    return ops.exp(keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True))


ROWS = {
    "bert-masked-words": {"model": bert, "data": masked_words, "compile": {"weighted_metrics": ["accuracy"]}},
    "gpt-weights": {"loop": True, "model": gpt, "data": next_words, "metrics": lambda: [perplexity]},
    "t5-relative-bias": {"model": t5, "data": next_words_unweighted}
    | {"loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)},
    "llama": {"model": Llama, "data": next_words, "optimizer": lambda: O.SGD(0.05)},
    "text-classifier": {
        "loop": True,
        "model": Classifier,
        "data": tokens,
        "optimizer": lambda: O.SGD(0.1, momentum=0.9),
    }
    | {"metrics": lambda: ["accuracy"], "judged": True},
    "seq2seq-attention": {"model": translator, "data": translations},
    "bidirectional-gru": {"loop": True, "model": tagger, "data": tagged, "optimizer": lambda: O.Adam(0.02)}
    | {"metrics": lambda: ["accuracy"], "judged": True},
    "random-field": {"model": FieldTagger, "data": tagged, "loss": lambda: None},
    "speech-ctc": {"model": listener, "data": spoken, "loss": lambda: alignment, "optimizer": lambda: O.SGD(0.02)},
    "wavenet": {"model": wavenet, "data": heard, "metrics": lambda: ["accuracy"]},
    "fnet": {"model": fnet, "data": tokens, "metrics": lambda: ["accuracy"]},
    "skip-grams": {"model": SkipGrams, "data": contexts, "optimizer": lambda: O.Adam(0.02)},
}
