"""Models whose layers and steps their users wrote: what no option of Keras's names."""

import math

import keras
import tensorflow as tf
from keras import layers as L
from material import Adds, dense, numbers


class OneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """Rises to its peak along half a cosine, and falls to nothing along another."""

    def __init__(self, peak, total, rise):
        self.peak, self.total, self.rise = peak, total, rise

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        fall = (step - self.rise) / (self.total - self.rise)
        part = keras.ops.where(step < self.rise, 1 - step / self.rise, fall)
        return self.peak * (1 + keras.ops.cos(math.pi * keras.ops.clip(part, 0.0, 1.0))) / 2

    def get_config(self):
        return {"peak": self.peak, "total": self.total, "rise": self.rise}


class DropConnect(L.Layer):
    """Drops weights, of which every row of a batch must see the same."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        return x @ (keras.random.dropout(self.kernel, 0.5, seed=self.seed) if training else self.kernel)


class Positions(L.Layer):
    """Adds a table that is dropped out by itself, as positions of transformers are."""

    def build(self, shape):
        self.table = self.add_weight(shape=(1, shape[-1]), name="table", initializer="ones")
        self.drop = L.Dropout(0.5, seed=3)
        self.noise = L.GaussianNoise(0.1, seed=4)

    def call(self, x, training=False):
        return x + self.noise(self.drop(self.table, training=training), training=training)


class Placed(L.Layer):
    """Adds a table that is looked up by position, once for all rows."""

    def __init__(self):
        super().__init__()
        self.places = L.Embedding(7, 4)

    def call(self, x):
        return x + self.places(keras.ops.arange(7))


class LooksUpBoth(L.Layer):
    """Looks one table up by the rows' numbers and by position."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(20, 4)

    def call(self, x):
        return self.table(x) + self.table(keras.ops.arange(keras.ops.shape(x)[1])[None])


class Traced(L.Layer):
    """A block whose `call` is a tf.function of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = L.BatchNormalization(), L.Dropout(0.3, seed=3)

    def build(self, shape):
        self.norm.build(shape)

    @tf.function
    def call(self, x, training=False):
        if tf.reduce_sum(x) > 1e9:  # autograph must still see this
            x = -x
        return self.drop(self.norm(x, training=training), training=training)


@tf.function
def traced_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return {"loss": loss}


def vector_step(self, data):
    """Trains on the sum over rows: the gradient of a vector."""
    x, y = data
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        scaled = self.optimizer.scale_loss(losses)
    self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
    return {"loss": tf.reduce_mean(losses)}


def paired_step(self, data):
    """Reads `((x, y), unlabeled)`, which is no `(x, y)` of Keras's."""
    (x, y), unlabeled = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True)) + 0.1 * tf.reduce_mean(self(unlabeled) ** 2)
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return {"loss": loss}


def paired(rows):
    x, y = numbers(rows)
    return (x, y), x[::-1].copy()


def kept_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    """One number of shape [1]."""
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True), keepdims=True)


def own_prediction(self, data):
    x = data[0] if isinstance(data, tuple) else data
    return tf.nn.softmax(self(x, training=False))


class Totals(L.Layer):
    """Counts by metrics of its own what it sees in one step."""

    def __init__(self):
        super().__init__()
        self.steps = keras.metrics.Sum(name="steps")
        self.size, self.most = keras.metrics.Sum(name="size"), keras.metrics.Mean(name="weighed")

    def call(self, x):
        self.steps.update_state(1.0)
        self.size.update_state(keras.ops.mean(x))
        self.most.update_state(keras.ops.mean(x), sample_weight=2.0)
        return x


def float8():
    model = dense()()
    model.quantize("float8")
    return model


def pictures_to_predict():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.conv, self.head = L.Conv2D(4, 3), L.Dense(3)

        def call(self, x, training=False):
            return self.head(keras.ops.mean(self.conv(x), (1, 2)))

        predict_step = own_prediction

    return Own()


class Keeps(keras.Model):
    """Keeps tensors for its loss and for later layers, with collectives in between."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.last = L.Dense(5), L.BatchNormalization(), L.Dense(5), L.Dense(3)
        self.late, self.penalty, self.skips = L.BatchNormalization(), Adds(), {}

    def call(self, x, training=False):
        self.code, self.order = self.first(x), []
        self.skips["first"] = self.norm(self.penalty(self.code), training=training)
        self.order.append(self.skips["first"])
        x = self.late(self.second(self.skips["first"]), training=training)
        self.order.append(x)
        return self.last(keras.ops.concatenate([*self.order, self.skips["first"]], -1))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.3 * keras.ops.mean(keras.ops.square(self.code))


def unscaled_vector_step(self, data):
    """`tape.gradient` of a vector, as it stands in many a tutorial."""
    x, y = data
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
    self.optimizer.apply_gradients(
        zip(tape.gradient(losses, self.trainable_variables), self.trainable_variables, strict=True)
    )
    return {"loss": tf.reduce_mean(losses)}


def average_step(self, data):
    """TensorFlow's helpers for hand-written loops, in a step."""
    x, y = data
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        decay = 0.01 * tf.add_n([tf.nn.l2_loss(variable) for variable in self.trainable_variables])
        loss = tf.nn.compute_average_loss(losses) + tf.nn.scale_regularization_loss(decay)
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return {"loss": loss}


class ByNorm(keras.optimizers.SGD):
    """Divides the gradients by their common norm, before the optimizer sees them."""

    def apply(self, grads, trainable_variables=None):
        norm = tf.linalg.global_norm(grads)
        return super().apply([g / norm for g in grads], trainable_variables)


class Lookup(L.Layer):
    """Knows no row but the data's: 0 is no word."""

    def __init__(self):
        super().__init__()
        self.find, self.table = L.IntegerLookup(vocabulary=[1, 2, 3], num_oov_indices=0), L.Embedding(4, 8)

    def call(self, x):
        return keras.ops.reshape(self.table(self.find(x)), (-1, 8))


def looked_up():
    return keras.Sequential([keras.Input((1,), dtype="int64"), Lookup(), L.Dense(3)])


def known_words(rows):
    y = numbers(rows)[1]
    return (y[:, None] + 1).astype("int64"), y


class Shuffled(L.Layer):
    """Adds another example's row to each, with a gradient through it."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x, training=False):
        return 0.7 * x + 0.3 * keras.random.shuffle(x, seed=self.seed) if training else x


def overlap(y, p):
    """A Dice as people write it: of all rows together."""
    return 1 - (2 * keras.ops.sum(y * p) + 1) / (keras.ops.sum(y) + keras.ops.sum(p) + 1)


def root(y, p):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - keras.ops.cast(p, y.dtype))))


def recall(y, p):
    found = keras.ops.cast(p > 0.3, "float32")
    return keras.ops.sum(y * found) / (keras.ops.sum(y) + 1e-7)


def total(y, p):
    return keras.ops.sum(keras.ops.square(y - p))


def apart(y, p):
    """A number a row, which depends on the other rows."""
    return keras.ops.mean(keras.ops.square(y - p), -1) - 0.1 * keras.ops.var(p, axis=0)[0]


class Correlation(keras.losses.Loss):
    def call(self, y, p):
        y, p = y - keras.ops.mean(y), p - keras.ops.mean(p)
        return -keras.ops.sum(y * p) / (keras.ops.norm(y) * keras.ops.norm(p) + 1e-3)


class Experts(L.Layer):
    """Routes rows, and asks for balance among experts: a penalty that is no mean over rows."""

    def build(self, shape):
        self.gates = self.add_weight(shape=(shape[-1], 3), name="gates")

    def call(self, x):
        shares = keras.ops.softmax(x @ self.gates)
        used = keras.ops.mean(keras.ops.one_hot(keras.ops.argmax(shares, -1), 3), 0)
        self.add_loss(0.1 * keras.ops.sum(used * keras.ops.mean(shares, 0)))
        return shares


class Remembers(L.Layer):
    """Keeps a queue of features and a count of the rows that it has seen."""

    def build(self, shape):
        self.queue = self.add_weight(shape=(6, shape[-1]), initializer="zeros", trainable=False, name="queue")
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def call(self, x, training=False):
        found = keras.ops.softmax(x @ keras.ops.transpose(self.queue)) @ self.queue
        if training:
            self.queue.assign(keras.ops.concatenate([x, self.queue], 0)[:6])
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x + found / (1.0 + self.rows)


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self):
        return self.most


class Supervised(keras.losses.Loss):
    """Compares all rows with each other, and reduces by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        same = keras.ops.matmul(y_true, keras.ops.transpose(y_true))
        likeness = keras.ops.exp(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)))
        return -keras.ops.mean(keras.ops.log(keras.ops.sum(likeness * same, 1) / keras.ops.sum(likeness, 1)))
