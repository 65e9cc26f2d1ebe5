"""Models that compare rows with each other, and recommenders, small, as other people write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops
from keras import optimizers as O
from material import numbers

COUNT = 12  # of items


def encoder(size=6, *between):
    return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), *between, L.Dense(size)])


def update(model, tape, loss, *parts):
    """One step of the optimizer on these parts of the model, or on all of it."""
    variables = [v for part in parts for v in part.trainable_variables] or model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return {"loss": loss}


class Siamese(keras.Model):
    """Distances of pairs, by one encoder."""

    def __init__(self):
        a, b = keras.Input((6,)), keras.Input((6,))
        encode = encoder()
        apart = ops.sum(ops.square(encode(a) - encode(b)), axis=1, keepdims=True)
        super().__init__((a, b), ops.sqrt(ops.maximum(apart, 1e-7)))


def pairs(rows):
    (x, y), (other, its) = numbers(rows), numbers(rows, 4)
    return (x, other), (y == its).astype("float32")[:, None]


def contrastive(y, p):
    """As in Keras's recipe of Siamese networks: a mean over the pairs."""
    return ops.mean((1 - y) * ops.square(p) + y * ops.square(ops.maximum(1.0 - p, 0)))


class Triplets(keras.Model):
    """Three encoders in one, and a step of its own."""

    def __init__(self):
        super().__init__()
        self.encode = encoder()
        self.seen = keras.metrics.Mean(name="loss")

    def call(self, three):
        anchor, near, far = (self.encode(each) for each in three)
        return ops.sum(ops.square(anchor - near), -1), ops.sum(ops.square(anchor - far), -1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            near, far = self(data[0], training=True)
            loss = ops.maximum(near - far + 0.5, 0.0)
        update(self, tape, loss)
        self.seen.update_state(loss)
        return {"loss": self.seen.result()}

    @property
    def metrics(self):
        return [self.seen]


def threes(rows):
    return tuple(numbers(rows, seed)[0] for seed in (3, 4, 5)), np.zeros(rows)


def directions():
    return keras.Sequential([encoder(4), L.UnitNormalization()])


def semi_hard(y, p, margin=0.5):
    """Triplets whose negative is the nearest of those farther than the positive, as in TensorFlow Addons."""
    y = ops.reshape(y, (-1, 1))
    apart = ops.maximum(2 - 2 * ops.matmul(p, ops.transpose(p)), 0.0)
    same = ops.equal(y, ops.transpose(y))
    farther = ops.logical_and(~same[:, None], apart[:, None] > apart[:, :, None])
    outside = ops.min(ops.where(farther, apart[:, None], 9.0), -1)
    inside = ops.max(ops.where(same, -9.0, apart), -1, keepdims=True)
    negative = ops.where(ops.any(farther, -1), outside, inside)
    positives = ops.cast(same, "float32") - ops.eye(ops.shape(y)[0])
    losses = ops.maximum(apart - negative + margin, 0.0) * positives
    return ops.sum(losses) / ops.maximum(ops.sum(positives), 1.0)


class Views(keras.Model):
    """Draws two views of each row."""

    def __init__(self, size=4):
        super().__init__()
        self.encode, self.head = encoder(8, L.BatchNormalization()), encoder_head(size)
        self.seed = keras.random.SeedGenerator(2)

    def call(self, x, training=False):
        return self.head(self.encode(x, training=training))

    def view(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        a, b = self.view(x), self.view(x)
        with tf.GradientTape() as tape:
            loss = self.compare(self(a, training=True), self(b, training=True))
        return update(self, tape, loss)


def encoder_head(size):
    return keras.Sequential([keras.Input((8,)), L.Dense(6, "tanh"), L.Dense(size)])


def entropy_of_matches(scores):
    labels = ops.arange(ops.shape(scores)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))


class SimClr(Views):
    def compare(self, a, b):
        a, b = ops.normalize(a, axis=1), ops.normalize(b, axis=1)
        scores = ops.matmul(a, ops.transpose(b)) / 0.5
        return (entropy_of_matches(scores) + entropy_of_matches(ops.transpose(scores))) / 2


class Stacked(Views):
    """NT-Xent over both views in one batch of twice the rows."""

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            p = ops.normalize(self(ops.concatenate([self.view(x), self.view(x)], 0), training=True), axis=1)
            half = ops.shape(x)[0]
            scores = ops.matmul(p, ops.transpose(p)) / 0.5 - 1e9 * ops.eye(2 * half)
            labels = (ops.arange(2 * half) + half) % (2 * half)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))
        return update(self, tape, loss)


class Barlow(Views):
    def compare(self, a, b):
        a, b = ((z - ops.mean(z, 0)) / (ops.std(z, 0) + 1e-3) for z in (a, b))
        c = ops.matmul(ops.transpose(a), b) / ops.cast(ops.shape(a)[0], "float32")
        return ops.sum(ops.square(c - ops.eye(4)) * (0.1 + 0.9 * ops.eye(4)))


class VicReg(Views):
    def compare(self, a, b):
        loss = ops.mean(ops.square(a - b))
        for z in (a, b):
            z = z - ops.mean(z, axis=0)
            loss += ops.mean(ops.relu(1 - ops.sqrt(ops.var(z, axis=0) + 1e-4)))
            c = ops.matmul(ops.transpose(z), z) / ops.cast(ops.shape(z)[0] - 1, "float32")
            loss += 0.1 * ops.sum(ops.square(c * (1 - ops.eye(4)))) / 4
        return loss


def follow(target, source, momentum):
    """The target's weights move toward the source's."""
    for slow, fast in zip(target.weights, source.weights, strict=True):
        slow.assign(momentum * slow + (1 - momentum) * fast)


class Byol(Views):
    """Predicts what a slow copy of itself says of the other view."""

    def __init__(self):
        super().__init__(8)
        self.slow, self.predict_other = encoder(8, L.BatchNormalization()), encoder_head(8)
        self.slow.trainable = False
        self.slow.set_weights(self.encode.get_weights())

    def train_step(self, data):
        a, b = self.view(data[0]), self.view(data[0])
        with tf.GradientTape() as tape:
            loss = 0.0
            for one, other in ((a, b), (b, a)):
                p = ops.normalize(self.predict_other(self(one, training=True)), axis=1)
                z = ops.normalize(self.slow(other, training=False), axis=1)
                loss += ops.mean(2 - 2 * ops.sum(p * ops.stop_gradient(z), axis=1))
        logs = update(self, tape, loss, self.encode, self.head, self.predict_other)
        follow(self.slow, self.encode, 0.9)
        return logs


class MoCo(Views):
    """Compares with a queue of what the slow copy said of earlier batches."""

    def __init__(self):
        super().__init__(8)
        self.slow = encoder(8, L.BatchNormalization())
        self.slow.trainable = False
        self.slow.set_weights(self.encode.get_weights())
        start = keras.initializers.RandomNormal(seed=6)
        self.queue = self.add_weight(shape=(16, 8), initializer=start, trainable=False, name="queue")

    def train_step(self, data):
        a, b = self.view(data[0]), self.view(data[0])
        with tf.GradientTape() as tape:
            q = ops.normalize(self(a, training=True), axis=1)
            k = ops.stop_gradient(ops.normalize(self.slow(b, training=True), axis=1))
            near = ops.sum(q * k, axis=1, keepdims=True)
            scores = ops.concatenate([near, ops.matmul(q, ops.transpose(self.queue))], 1) / 0.2
            labels = ops.zeros(ops.shape(q)[0], "int32")
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))
        logs = update(self, tape, loss, self.encode, self.head)
        self.queue.assign(ops.concatenate([k, self.queue], 0)[:16])
        follow(self.slow, self.encode, 0.9)
        return logs


class Supervised(keras.losses.Loss):
    """Rows of one class attract each other; as in Keras's recipe, it overrides `__call__`."""

    def __call__(self, labels, features, sample_weight=None):
        scores = ops.matmul(features, ops.transpose(features)) / 0.5
        labels = ops.reshape(labels, (-1, 1))
        others = 1.0 - ops.eye(ops.shape(labels)[0])
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32") * others
        logs = scores - ops.log(ops.sum(ops.exp(scores) * others, 1, keepdims=True))
        return -ops.mean(ops.sum(logs * same, 1) / ops.maximum(ops.sum(same, 1), 1.0))


class Clip(keras.Model):
    """Pictures and texts, with a temperature that it learns."""

    def __init__(self):
        super().__init__()
        self.pictures, self.texts = encoder(4), encoder(4)
        self.scale = self.add_weight(shape=(), initializer=keras.initializers.Constant(1.5), name="scale")

    def call(self, two):
        pictures, texts = (ops.normalize(net(x)) for net, x in zip((self.pictures, self.texts), two, strict=True))
        return ops.exp(self.scale) * ops.matmul(pictures, ops.transpose(texts))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return (entropy_of_matches(y_pred) + entropy_of_matches(ops.transpose(y_pred))) / 2


def two_kinds(rows):
    return (numbers(rows)[0], numbers(rows, 4)[0]), np.zeros(rows)


class Margin(L.Layer):
    """ArcFace: angles to the classes' centers, with a margin for the row's own class."""

    def build(self, shapes):
        self.centers = self.add_weight(shape=(shapes[0][-1], 3), name="centers")

    def call(self, given):
        x, y = given
        cosine = ops.matmul(ops.normalize(x), ops.normalize(self.centers, axis=0))
        angle = ops.arccos(ops.clip(cosine, -0.999, 0.999))
        return 4.0 * ops.cos(angle + 0.3 * ops.one_hot(y, 3))


def arcface():
    x, y = keras.Input((6,)), keras.Input((), dtype="int32")
    return keras.Model((x, y), Margin()((encoder()(x), y)))


def with_labels(rows):
    x, y = numbers(rows)
    return (x, y.astype("int32")), y


class Centered(keras.Model):
    """Center loss: its centers move by hand, each by the mean of its class in the batch."""

    def __init__(self):
        super().__init__()
        self.encode, self.classify = encoder(4), L.Dense(3)
        self.centers = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False, name="centers")

    def call(self, x):
        return self.classify(self.encode(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            features = self.encode(x)
            loss = self.compute_loss(x, y, self.classify(features))
            loss += 0.1 * ops.mean(ops.square(features - ops.take(self.centers, y, axis=0)))
        logs = update(self, tape, loss)
        chosen = ops.one_hot(y, 3)
        sums = ops.matmul(ops.transpose(chosen), features)
        counts = ops.sum(chosen, 0)[:, None]
        self.centers.assign_add(0.5 * (sums - counts * self.centers) / (1.0 + counts))
        return logs


class Proxies(keras.losses.Loss):
    """Proxy-NCA: the loss itself has the classes' vectors, which stay as drawn."""

    def __init__(self):
        super().__init__()
        self.proxies = np.random.default_rng(9).normal(size=(3, 4)).astype("float32")

    def call(self, y, p):
        apart = ops.sum(ops.square(p[:, None] - ops.normalize(self.proxies)[None]), -1)
        return keras.losses.sparse_categorical_crossentropy(y, -apart, from_logits=True)


class Retrieval(keras.Model):
    """Two towers; the other rows' items are the negatives, as in KerasRS's and TensorFlow's recommenders."""

    def __init__(self):
        super().__init__()
        self.users = keras.Sequential([L.Embedding(COUNT, 4), L.Dense(4)])
        self.items = keras.Sequential([L.Embedding(COUNT, 4), L.Dense(4)])
        self.loss_of = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")

    def call(self, given):
        return self.users(given["user"]), self.items(given["item"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        users, items = y_pred
        scores = ops.matmul(users, ops.transpose(items))
        twins = ops.cast(ops.equal(x["item"][:, None], x["item"][None]), "float32") - ops.eye(ops.shape(scores)[0])
        return 0.1 * self.loss_of(ops.eye(ops.shape(scores)[0]), scores - 1e6 * twins)


def visits(rows):
    rng = np.random.default_rng(3)
    return {"user": rng.integers(0, COUNT, rows), "item": rng.integers(0, COUNT, rows)}, np.zeros(rows)


class Found(keras.metrics.Metric):
    """The share of rows whose item is among the best three of all items."""

    def __init__(self):
        super().__init__(name="found")
        self.hits, self.rows = (self.add_variable((), "zeros", name=name) for name in ("hits", "rows"))

    def update_state(self, y, scores, sample_weight=None):
        best = ops.top_k(scores, 3)[1]
        self.hits.assign_add(ops.sum(ops.cast(ops.any(ops.equal(best, ops.cast(y, "int32")[:, None]), 1), "float32")))
        self.rows.assign_add(ops.cast(ops.shape(scores)[0], "float32"))

    def result(self):
        return self.hits / self.rows


def factorized():
    user = keras.Input((), dtype="int32", name="user")
    return keras.Model(user, L.Dense(COUNT, use_bias=False)(L.Embedding(COUNT, 4)(user)))


def visitors(rows):
    given, _ = visits(rows)
    return given["user"], given["item"]


ROWS = {
    "siamese": {"model": Siamese, "data": pairs, "loss": lambda: contrastive},
    "triplets": {"model": Triplets, "data": threes, "optimizer": lambda: O.SGD(0.02)},
    "triplets-semi-hard": {"model": directions, "loss": lambda: semi_hard},
    "simclr": {"model": SimClr, "optimizer": lambda: O.Adam(0.01)},
    "simclr-stacked": {"model": Stacked, "optimizer": lambda: O.SGD(0.1)},
    "barlow-twins": {"model": Barlow, "optimizer": lambda: O.SGD(0.05)},
    "vicreg": {"model": VicReg, "optimizer": lambda: O.SGD(0.05)},
    "byol": {"model": Byol, "optimizer": lambda: O.SGD(0.1)},
    "moco": {"model": MoCo, "optimizer": lambda: O.SGD(0.05)},
    "supcon-call": {"model": directions, "loss": Supervised},
    "clip": {"model": Clip, "data": two_kinds, "optimizer": lambda: O.Adam(0.01)},
    "arcface": {"model": arcface, "data": with_labels},
    "center-loss": {"model": Centered},
    "proxies": {"model": directions, "loss": Proxies},
    "two-towers": {"model": Retrieval, "data": visits, "optimizer": lambda: O.Adagrad(0.1)},
    "factorized-top-k": {"model": factorized, "data": visitors, "metrics": lambda: [Found()], "judged": True},
}
