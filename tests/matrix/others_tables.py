"""Recommenders, tables, graphs, sets and experts, small, as other people write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import dense, numbers, sequences, sequential

COUNT = 12


class Cross(L.Layer):
    """DCN's: the first features times a projection of the last."""

    def __init__(self):
        super().__init__()
        self.down, self.up = L.Dense(2, use_bias=False), None

    def build(self, first_shape, last_shape):
        self.up = L.Dense(first_shape[-1])
        self.down.build(last_shape)
        self.up.build((None, 2))

    def call(self, first, last):
        return first * self.up(self.down(last)) + last


class Interactions(L.Layer):
    """DLRM's: products of all pairs of features."""

    def call(self, features):
        x = ops.stack(features, axis=1)
        products = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        lower = [3 * i + j for i in range(3) for j in range(i)]
        return ops.take(ops.reshape(products, (-1, 9)), lower, axis=1)


def users():
    return {
        "user": keras.Input((), dtype="int32", name="user"),
        "item": keras.Input((), dtype="int32", name="item"),
        "values": keras.Input((4,), name="values"),
    }


def clicks(rows):
    rng, (x, y) = np.random.default_rng(3), numbers(rows)
    ids = {name: rng.integers(0, COUNT, rows).astype("int32") for name in ("user", "item")}
    return ids | {"values": x[:, :4]}, (y > 0).astype("float32")[:, None]


def dcn():
    given = users()
    x = first = L.Concatenate()([*(L.Embedding(COUNT, 4)(given[n]) for n in ("user", "item")), given["values"]])
    for _ in range(2):
        x = Cross()(first, x)
    return keras.Model(given, L.Dense(1, "sigmoid")(L.Dense(6, "tanh")(x)))


def dlrm():
    given = users()
    bottom = L.Dense(4, "tanh")(given["values"])
    pairs = Interactions()([L.Embedding(COUNT, 4)(given["user"]), L.Embedding(COUNT, 4)(given["item"]), bottom])
    return keras.Model(given, L.Dense(1, "sigmoid")(L.Concatenate()([pairs, bottom])))


class WideAndDeep(keras.Model):
    """Hashed crosses for a linear part, tables for a deep one, an optimizer for each."""

    def __init__(self):
        super().__init__()
        self.hashed = L.HashedCrossing(20)
        self.wide = L.Embedding(20, 1)
        self.tables, self.deep = [L.Embedding(COUNT, 4) for _ in range(2)], L.Dense(6, "tanh")
        self.out = L.Dense(1)
        self.second = O.Ftrl(0.1)

    def call(self, given):
        wide = self.wide(self.hashed((given["user"], given["item"])))
        deep = ops.concatenate([t(given[n]) for t, n in zip(self.tables, ("user", "item"), strict=True)], 1)
        return ops.sigmoid(ops.reshape(wide, (-1, 1)) + self.out(self.deep(deep)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        wide = self.wide.trainable_variables
        deep = [v for v in self.trainable_variables if not any(v is w for w in wide)]
        found = tape.gradient(loss, [*wide, *deep])
        self.second.apply_gradients(zip(found[:1], wide, strict=True))
        self.optimizer.apply_gradients(zip(found[1:], deep, strict=True))
        return self.compute_metrics(x, y, None, None) | {"loss": loss}


class Next(keras.Model):
    """SASRec: what follows each visit, against one item that was not visited; padding does not count."""

    def __init__(self):
        super().__init__()
        self.items, self.places = L.Embedding(COUNT, 8, mask_zero=True), L.Embedding(5, 8)
        self.attend, self.norm = L.MultiHeadAttention(1, 8, dropout=0.1, seed=2), L.LayerNormalization()

    def call(self, x, training=False):
        h = self.items(x) * 8**0.5 + self.places(ops.arange(ops.shape(x)[1]))
        return self.norm(h + self.attend(h, h, use_causal_mask=True, training=training))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        near, far = (ops.sum(y_pred * self.items(y[name]), -1) for name in ("next", "other"))
        there = ops.cast(y["next"] > 0, "float32")
        return ops.sum((ops.softplus(-near) + ops.softplus(far)) * there) / ops.maximum(ops.sum(there), 1.0)


def visits(rows):
    rng = np.random.default_rng(3)
    x = np.where(np.arange(6) < 2 + np.arange(rows)[:, None] % 5, rng.integers(1, COUNT, (rows, 6)), 0)
    return x[:, :-1], {"next": x[:, 1:], "other": rng.integers(1, COUNT, (rows, 5))}


class Feature(L.Layer):
    """Each column has a vector, looked up by its number, as tabular transformers do."""

    def __init__(self):
        super().__init__()
        self.columns, self.values = L.Embedding(6, 8), L.Dense(8)

    def call(self, x):
        return self.values(x[:, :, None]) + self.columns(ops.arange(6))


def tabular():
    x = given = keras.Input((6,))
    x = Feature()(x)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4, use_bias=False)(x, x))
    return keras.Model(given, L.Dense(3)(L.Flatten()(x)))


def factors():
    """A factorization machine: half of (a square of sums less a sum of squares)."""
    given = users()
    x = ops.stack([L.Embedding(COUNT, 4)(given["user"]), L.Embedding(COUNT, 4)(given["item"])], axis=1)
    both = 0.5 * ops.sum(ops.square(ops.sum(x, axis=1)) - ops.sum(ops.square(x), axis=1), axis=1, keepdims=True)
    return keras.Model(given, ops.sigmoid(both + L.Dense(1)(given["values"])))


class GraphConv(L.Layer):
    """Neighbors' mean by a dense adjacency, one graph a row."""

    def __init__(self, units):
        super().__init__()
        self.dense = L.Dense(units, "tanh")

    def build(self, nodes_shape, edges_shape):
        self.dense.build(nodes_shape)

    def call(self, nodes, edges):
        edges = edges + ops.eye(5)
        return self.dense(ops.matmul(edges / ops.sum(edges, -1, keepdims=True), nodes))


def graph():
    nodes, edges = keras.Input((5, 4)), keras.Input((5, 5))
    x = GraphConv(6)(GraphConv(6)(nodes, edges), edges)
    return keras.Model((nodes, edges), L.Dense(3)(L.GlobalMaxPooling1D()(x)))


def graphs(rows):
    nodes, y = sequences(rows)
    return (nodes, np.random.default_rng(3).integers(0, 2, (rows, 5, 5)).astype("float32")), y


class Messages(L.Layer):
    """All graphs of a batch as one: edges as pairs of nodes' numbers, messages summed by segments."""

    def __init__(self):
        super().__init__()
        self.message, self.gate = L.Dense(4, "tanh"), L.Dense(4)

    def call(self, given):
        nodes, pairs = given
        rows = ops.shape(nodes)[0]
        flat = ops.reshape(nodes, (-1, 4))
        pairs = ops.reshape(pairs + 5 * ops.arange(rows)[:, None, None], (-1, 2))
        sent = self.message(ops.concatenate([ops.take(flat, pairs[:, i], axis=0) for i in range(2)], 1))
        received = ops.segment_sum(sent, pairs[:, 1], num_segments=5 * rows)
        return ops.reshape(flat + self.gate(received), (-1, 5, 4))


def messages():
    nodes, pairs = keras.Input((5, 4)), keras.Input((7, 2), dtype="int32")
    return keras.Model((nodes, pairs), L.Dense(3)(L.GlobalAveragePooling1D()(Messages()((nodes, pairs)))))


def edges(rows):
    nodes, y = sequences(rows)
    return (nodes, np.random.default_rng(3).integers(0, 5, (rows, 7, 2)).astype("int32")), y


def deep_sets():
    x = given = keras.Input((5, 4))
    inner = L.Dense(6, "silu")(x)
    invariant = L.Dense(6)(ops.mean(inner, axis=1, keepdims=True))
    x = ops.sum(ops.silu(L.Dense(6)(x) + invariant), axis=1)
    return keras.Model(given, L.Dense(3)(x))


def instances():
    """Attention over the members of a bag, with a gate, as in multiple-instance learning."""
    x = given = keras.Input((5, 4))
    scores = L.Dense(1, use_bias=False)(L.Dense(6, "tanh")(x) * L.Dense(6, "sigmoid")(x))
    return keras.Model(given, L.Dense(3)(ops.sum(ops.softmax(scores, axis=1) * x, axis=1)))


class Ordered(L.Layer):
    """One number, and two thresholds in order."""

    def build(self, shape):
        self.first = self.add_weight(shape=(1,), initializer="zeros", name="first")
        self.gap = self.add_weight(shape=(1,), initializer="zeros", name="gap")

    def call(self, x):
        return x - ops.concatenate([self.first, self.first + ops.softplus(self.gap)])


def above(y, p):
    """Whether the class is above each threshold."""
    wanted = ops.cast(ops.reshape(y, (-1, 1)) > ops.arange(2, dtype=y.dtype), "float32")
    return ops.sum(ops.softplus(p) - wanted * p, axis=1)


def pinball(y, p):
    """Three quantiles; their order is asked for by a penalty."""
    apart = y - p
    levels = ops.convert_to_tensor([0.1, 0.5, 0.9])
    crossing = ops.relu(p[:, :-1] - p[:, 1:])
    return ops.mean(ops.maximum(levels * apart, (levels - 1) * apart)) + ops.mean(crossing)


def one_number(rows):
    x, y = numbers(rows)
    return x, (x[:, :1] * 2 + y[:, None]).astype("float32")


class Gaussian(L.Layer):
    """Random features of a Gaussian process; the precision of its weights is a running sum over rows."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(stddev=1.0, seed=3)
        self.waves = self.add_weight(shape=(shape[-1], 6), initializer=start, trainable=False, name="waves")
        self.beta = self.add_weight(shape=(6, 3), name="beta")
        self.precision = self.add_weight(shape=(6, 6), initializer="identity", trainable=False, name="precision")

    def call(self, x, training=False):
        features = ops.cos(ops.matmul(x, self.waves)) * (2 / 6) ** 0.5
        if training:
            both = ops.matmul(ops.transpose(features), features)
            self.precision.assign(0.9 * self.precision + 0.1 * both)
            return ops.matmul(features, self.beta)
        variance = ops.sum(ops.matmul(features, ops.inv(self.precision)) * features, 1, keepdims=True)
        return ops.matmul(features, self.beta) / ops.sqrt(1 + variance)


class Sparse(L.Layer):
    """The two best of four experts, with a loss for their balance and for large logits."""

    def build(self, shape):
        self.gates = self.add_weight(shape=(shape[-1], 4), name="gates")
        self.kernels = self.add_weight(shape=(4, shape[-1], shape[-1]), name="kernels")

    def call(self, x):
        scores = ops.matmul(x, self.gates)
        shares = ops.softmax(scores)
        best, which = ops.top_k(shares, 2)
        chosen = ops.sum(ops.one_hot(which, 4) * (best / ops.sum(best, -1, keepdims=True))[..., None], axis=1)
        used, asked = ops.mean(ops.cast(chosen > 0, "float32"), axis=0), ops.mean(shares, axis=0)
        self.add_loss(0.1 * 4 * ops.sum(used * asked) + 0.01 * ops.mean(ops.square(ops.logsumexp(scores, -1))))
        return x + ops.einsum("bi,eij,be->bj", x, self.kernels, chosen)


class Capacity(L.Layer):
    """A switch of experts with room for half the batch each: who comes late is left out."""

    def build(self, shape):
        self.gates = self.add_weight(shape=(shape[-1], 2), name="gates")
        self.kernels = self.add_weight(shape=(2, shape[-1], shape[-1]), name="kernels")

    def call(self, x):
        shares = ops.softmax(ops.matmul(x, self.gates))
        chosen = ops.one_hot(ops.argmax(shares, -1), 2)
        place = ops.cumsum(chosen, axis=0) * chosen
        chosen = chosen * ops.cast(place <= ops.cast(ops.shape(x)[0] // 2, "float32"), "float32")
        return x + ops.einsum("bi,eij,be->bj", x, self.kernels, chosen * shares)


CLICKS = {"data": clicks, "loss": lambda: "binary_crossentropy", "metrics": lambda: ["AUC"]}
ADAM, ACCURACY = {"optimizer": lambda: O.Adam(0.01)}, {"metrics": lambda: ["accuracy"]}
ROWS = {
    "dcn": {"model": dcn, **CLICKS, **ADAM},
    "dlrm": {"model": dlrm, **CLICKS, "optimizer": lambda: O.Adagrad(0.1), "judged": True},
    "wide-and-deep": {"model": WideAndDeep, **CLICKS, **ADAM, "metrics": lambda: None},
    "factorization-machine": {"model": factors, **CLICKS},
    "next-item": {"model": Next, "data": visits},
    "tabular-transformer": {"model": tabular, **ADAM, **ACCURACY},
    "graph-convolution": {"model": graph, "data": graphs, **ACCURACY},
    "graph-messages": {"loop": True, "model": messages, "data": edges, **ACCURACY},
    "deep-sets": {"loop": True, "model": deep_sets, "data": sequences, **ACCURACY},
    "instances": {"model": instances, "data": sequences, **ADAM, **ACCURACY},
    "ordinal": {"model": sequential((6,), lambda: L.Dense(1), Ordered), "loss": lambda: above},
    "quantiles": {"model": dense(), "data": one_number, "loss": lambda: pinball},
    "gaussian-process": {"model": sequential((6,), Gaussian), **ACCURACY, "judged": True},
    "experts-top-2": {"model": dense(Sparse), **ACCURACY},
    "experts-capacity": {"model": dense(Capacity)},
}
