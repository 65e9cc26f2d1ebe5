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


def sparsely(rows):
    x, y = numbers(rows)
    return tf.sparse.from_dense(np.where(x > 0, x, 0)), y


def one_hot_weighted(rows):
    return *one_hot(rows), weighted(rows)[2]


def above_zero(rows):
    x, y = one_hot(rows)
    return x, y + 0.5


def weightless_batch(rows):
    """The first batch of 8 weighs nothing at all."""
    x, y, weight = weighted(rows)
    return x, y, np.where(np.arange(rows) < 8, 0, weight).astype("float32")


def no_targets(rows):
    return (numbers(rows)[0],)


def images(rows):
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 8, 8, 1)).astype("float32") + np.linspace(0, 1, rows)[:, None, None, None].astype(
        "float32"
    ), rng.integers(0, 3, rows)


def colors(rows):
    """Pictures of three colors, from 0 to 255."""
    x, y = images(rows)
    return np.clip(80 * x + np.array([90, 120, 150]), 0, 255).astype("float32"), y


def colors_and_labels(rows):
    """Pictures and labels that a layer may mix, and targets that it does not see."""
    x, y = colors(rows)
    return {"images": x, "labels": np.eye(3, dtype="float32")[y]}, y


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


def tagged_half_weightless(rows):
    """Masked, and of each batch of 8 the first 4 rows weigh nothing: two of four replicas."""
    x, y, weight = tagged_weighted(rows)
    return x, y, weight * (np.arange(rows) % 8 >= 4)[:, None].astype("float32")


def half_empty(rows):
    """Of each batch of 8 the first 4 rows are padding alone."""
    x, y = tagged(rows)
    return np.where((np.arange(rows) % 8 < 4)[:, None], 0, x), y


def spelled(rows):
    """Words of two or three letters, padded with 0: targets of CTC."""
    y = np.random.default_rng(4).integers(1, 3, (rows, 3))
    return tokens(rows)[0], np.where(np.arange(3) < 2 + np.arange(rows)[:, None] % 2, y, 0)


def drawings(rows):
    """Pictures, and which of their dots are bright."""
    x, _ = images(rows)
    return x, np.concatenate([x > 0.8, x < 0.2], -1).astype("float32")


def dictionary(rows):
    x, y = numbers(rows)
    return {"a": x[:, :2], "b": x[:, 2:]}, y


def nested(rows):
    x, y = numbers(rows)
    return {"a": x[:, :2], "more": (x[:, 2:4], x[:, 4:])}, y


def two_targets(rows):
    x, y = numbers(rows)
    return x, {"kind": y, "size": x[:, :1] * 2}


def two_targets_weighted(rows):
    weight = weighted(rows)[2]
    return *two_targets(rows), {"kind": weight, "size": weight[::-1].copy()}


def listed_targets(rows):
    x, y = two_targets(rows)
    return x, (y["kind"], y["size"])


def nested_targets(rows):
    x, _ = numbers(rows)
    return x, {"a": x[:, :1], "more": {"b": x[:, 1:3], "c": x[:, 3:]}}


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


def directions():
    """Ends in vectors of length 1."""
    return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(4), L.UnitNormalization()])


def drawing():
    return sequential((8, 8, 1), lambda: L.Dense(4, "tanh"), lambda: L.Dense(2, "sigmoid"))


def conv(*between):
    return sequential(
        (8, 8, 1),
        *between,
        lambda: L.Conv2D(4, 3, activation="tanh"),
        lambda: L.MaxPooling2D(),
        lambda: L.Flatten(),
        lambda: L.Dense(3),
    )


def colored(make, flat=L.Flatten):
    """A layer on pictures of three colors, and a dense one on what it makes of them."""
    return sequential((8, 8, 3), make, lambda: L.Rescaling(1 / 255), flat, lambda: L.Dense(3))


def deep(make):
    """The layer lies between layers that learn, so gradients go through it, to other replicas' pictures too."""
    before = lambda: L.Rescaling(1 / 255), lambda: L.Conv2D(2, 3, activation="tanh")
    return sequential((8, 8, 3), *before, make, lambda: L.Flatten(), lambda: L.Dense(3))


def mixed(make):
    """A layer on images and their labels; both of its outputs are used."""

    def build():
        given = {"images": keras.Input((8, 8, 3), name="images"), "labels": keras.Input((3,), name="labels")}
        out = make()(given)
        flat = [L.Flatten()(L.Rescaling(1 / 255)(out["images"])), out["labels"]]
        return keras.Model(given, L.Dense(3)(L.Concatenate()(flat)))

    return build


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


def listed_heads():
    x = keras.Input((6,))
    h = L.Dense(8, "tanh")(x)
    return keras.Model(x, [L.Dense(3, name="kind")(h), L.Dense(1, name="size")(h)])


def nested_heads():
    x = keras.Input((6,))
    h = L.Dense(8, "tanh")(x)
    return keras.Model(x, {"a": L.Dense(1)(h), "more": {"b": L.Dense(2)(h), "c": L.Dense(3)(h)}})


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


class Sums(L.Layer):
    """Counts rows and adds them up, as its variables' aggregation says; and keeps what the first replica saw."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.total = self.add_weight(shape=(shape[-1],), aggregation="sum", **options)
        self.rows = self.add_weight(shape=(), dtype="int32", aggregation="sum", **options)
        self.now = self.add_weight(shape=(), aggregation="sum", **options)
        self.steps = self.add_weight(shape=(), dtype="int64", **options)
        self.first = self.add_weight(shape=(), aggregation="only_first_replica", **options)

    def call(self, x, training=False):
        if training:
            self.total.assign_add(keras.ops.sum(x, axis=0))
            self.rows.assign_add(keras.ops.shape(x)[0])
            self.now.assign(keras.ops.sum(keras.ops.square(x)))
            self.steps.assign_add(1)
            self.first.assign(keras.ops.sum(x[0]))
        return x - self.total / keras.ops.cast(1 + self.rows, "float32")


class Codebook(L.Layer):
    """Vectors that move to the mean of what is nearest to them: a mean, and then a value made of it."""

    def build(self, shape):
        options = {"trainable": False, "shape": (4, shape[-1])}
        self.book = self.add_weight(initializer=keras.initializers.RandomNormal(seed=1), **options)
        self.sums = self.add_weight(initializer="ones", **options)
        self.counts = self.add_weight(initializer="ones", trainable=False, shape=(4, 1))

    def call(self, x, training=False):
        book = keras.ops.convert_to_tensor(self.book)
        near = keras.ops.one_hot(keras.ops.argmax(keras.ops.matmul(x, keras.ops.transpose(book)), -1), 4)
        if training:
            seen = keras.ops.mean(near, axis=0)[:, None]
            self.counts.assign(0.9 * self.counts + 0.1 * seen)
            self.sums.assign(0.9 * self.sums + 0.1 * keras.ops.mean(near[:, :, None] * x[:, None], axis=0))
            self.book.assign(self.sums / self.counts)
        return x + keras.ops.matmul(near, book)


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


def normed():
    """A hand-written step around layers that see the whole batch."""

    def call(self, x, training=False):
        return self.stack[1](self.norm(self.stack[0](x), training=training))

    class Normed(wired(train_step=own_step, call=call)):
        def __init__(self):
            super().__init__()
            self.norm = L.BatchNormalization()

    return Normed


def pointing():
    """A hand-written step around a model that ends in vectors of length 1."""

    def call(self, x, training=False):
        return keras.ops.normalize(self.stack[1](self.stack[0](x)))

    return wired(train_step=own_step, call=call)


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


def entropy_and_dice(y, p):
    return keras.ops.mean(keras.losses.binary_crossentropy(y, p)) + keras.losses.dice(y, p, axis=(0, 1, 2))


class OwnLoss(keras.losses.Loss):
    def call(self, y, p):
        return keras.ops.sum(keras.ops.abs(p - y), axis=-1)


def sparse():
    return keras.Sequential([keras.Input((6,), sparse=True), L.Dense(8, "tanh"), L.Dense(3)])


def pictures(rows):
    x = images(rows)[0]
    return x, np.tanh(x)


def filtered():
    return keras.Sequential([keras.Input((8, 8, 1)), L.Conv2D(1, 3, padding="same", activation="tanh")])
