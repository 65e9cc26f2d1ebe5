"""Steps that mix rows, or work on gradients: replicas are one device; what is by rows stays by rows."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(19, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 19)
SEEN = "sees the whole batch"


def positives(y, outputs):
    """The mean of the loss over rows of the classes 1 and 2: its divisor is the whole batch's."""
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    chosen = ops.cast(y > 0, "float32")
    return ops.sum(losses * chosen) / (ops.sum(chosen) + 1e-6)


def mean(y, outputs):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))


class Classifier(keras.Model):
    """Has everything that draws or counts by row: BatchNormalization, dropout, a layer that adds a loss."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm = layers.Dense(8, activation="tanh"), layers.BatchNormalization()
        self.drop, self.head = layers.Dropout(0.3, seed=1), layers.Dense(3, kernel_regularizer="l2")

    def build(self, shape):
        self.hidden.build(shape)
        self.norm.build((None, 8))
        self.drop.build((None, 8))
        self.head.build((None, 8))

    def call(self, x, training=False):
        self.code = self.norm(self.hidden(x), training=training)
        return self.head(self.drop(self.code, training=training))

    def learn(self, tape, loss):
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Divides(Classifier):
    """`compute_loss` with a divisor of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return positives(y, y_pred)


class Clips(Classifier):
    """Clips by the gradients' norm, by hand, and logs it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean(y, self(x, training=True)) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        gradients = [gradient * ops.minimum(1.0, 0.1 / norm) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


class Pairs(Classifier):
    """Compares each row with each other one (InfoNCE), by two encoders and numbers drawn for the batch."""

    def __init__(self):
        super().__init__()
        self.other, self.seed = layers.Dense(3, use_bias=False), keras.random.SeedGenerator(3)

    def build(self, shape):
        super().build(shape)
        self.other.build(shape)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            noise = keras.random.normal(ops.shape(x), stddev=0.1, seed=self.seed)
            similar = self(x, training=True) @ ops.transpose(self.other(x + noise))
            loss = mean(ops.arange(ops.shape(x)[0]), similar)
        return self.learn(tape, loss)


class Sharpness(Classifier):
    """SAM: goes up along the gradient, takes another gradient there, and goes back."""

    def train_step(self, data):
        x, y = data
        trained = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = mean(y, self(x, training=True))
        gradients = tape.gradient(loss, trained)
        steps = [0.05 * each / (tf.linalg.global_norm(gradients) + 1e-9) for each in gradients]
        for variable, step in zip(trained, steps, strict=True):
            variable.assign_add(step)
        with tf.GradientTape() as tape:
            there = mean(y, self(x, training=True))
        gradients = tape.gradient(there, trained)
        for variable, step in zip(trained, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply(gradients, trained)
        return {"loss": loss}


class Queue(Classifier):
    """Keeps the last rows of all batches, and a moving copy of weights (MoCo)."""

    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(shape=(24, 3), initializer="random_normal", trainable=False, name="queue")
        self.bias = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="bias")

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            outputs = ops.tanh(self(x, training=True))
            logits = ops.concatenate([ops.sum(outputs**2, -1, keepdims=True), outputs @ ops.transpose(self.queue)], -1)
            loss = mean(ops.zeros(ops.shape(x)[0]), logits)
        logs = self.learn(tape, loss)
        self.queue.assign(ops.concatenate([ops.stop_gradient(outputs), self.queue], 0)[:24])
        self.bias.assign(0.9 * self.bias + 0.1 * self.head.bias)
        return logs


class Kept(Classifier):
    """Uses a tensor that the model keeps in an attribute: the correlation of its columns."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            code = self.code - ops.mean(self.code, 0)
            loss = mean(y, outputs) + 0.01 * ops.sum(ops.square(ops.transpose(code) @ code - ops.eye(8)))
        return self.learn(tape, loss)


class Attacked(Classifier):
    """Moves the inputs along the gradient of the loss, whose norm is the whole batch's; and a layer's output."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            hidden = self.hidden(x)
            loss = mean(y, self.head(hidden))
        by_input, by_hidden = tape.gradient(loss, [x, hidden])
        with tf.GradientTape() as tape:
            moved = x + 0.1 * by_input / (ops.norm(by_input) + 1e-9)
            loss = mean(y, self(moved, training=True)) + ops.sum(by_hidden * self.hidden(x))
        return {**self.learn(tape, loss), "largest": ops.max(ops.abs(by_hidden))}


class Mixes(Classifier):
    """Mixes each row with one of a shuffled batch (mixup), by the rows' numbers."""

    def train_step(self, data):
        x, y = data
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=1)
        targets = ops.one_hot(y, 3)
        with tf.GradientTape() as tape:
            outputs = self(0.7 * x + 0.3 * ops.take(x, order, 0), training=True)
            targets = 0.7 * targets + 0.3 * ops.take(targets, order, 0)
            loss = ops.mean(keras.losses.categorical_crossentropy(targets, outputs, from_logits=True))
        return self.learn(tape, loss)


class Penalized(Classifier):
    """A gradient's gradient, and two gradients of one tape before the update."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            slopes = inner.gradient(outputs, x)
            first = mean(y, outputs)
            second = ops.square(ops.mean(ops.norm(slopes, axis=-1)) - 1.0)
        one, other = (tape.gradient(each, self.trainable_variables) for each in (first, second))
        weight = 0.01 * ops.tanh(sum(ops.sum(a * b) for a, b in zip(one, other, strict=True) if b is not None))
        both = [a if b is None else a + weight * b for a, b in zip(one, other, strict=True)]
        self.optimizer.apply(both, self.trainable_variables)
        return {"loss": first, "weight": weight}


class Function(Classifier):
    """A step that is a `tf.function`, with a condition on the loss of the whole batch."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = positives(y, self(x, training=True))
            if loss > 1e6:
                loss = loss / 2
        return self.learn(tape, loss)


class Words(keras.Model):
    """An embedding's slices, two kinds of output, and a number that the model gives for its rows."""

    def __init__(self):
        super().__init__()
        self.table, self.head = layers.Embedding(30, 4), layers.Dense(3)

    def call(self, x):
        words = self.table(ops.cast(ops.abs(x) * 5, "int32"))
        outputs = self.head(ops.mean(words, 1))
        return {"classes": outputs, "size": ops.mean(ops.square(words))}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x)
            loss = positives(y, outputs["classes"]) + outputs["size"]
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "size": outputs["size"]}


class Judged(Classifier):
    """A `test_step` that divides by the batch's positives, and tells a metric."""

    def test_step(self, data):
        x, y = data
        outputs = self(x)
        for metric in self.metrics:
            metric.update_state(positives(y, outputs)) if metric.name == "loss" else metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


class Compares(Classifier):
    """Its `call` gives scores of pairs of rows, as CLIP does: as wide as the batch."""

    def call(self, x, training=False):
        code = super().call(x, training=training)
        return ops.matmul(code, ops.transpose(code))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return mean(ops.arange(ops.shape(y_pred)[0]), y_pred) + sum(self.losses)


class Adversaries(Classifier):
    """Two updates in a step, each of a mean over rows: by rows, as most generative models are."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean(y, self(x, training=True))
        self.learn(tape, loss)
        with tf.GradientTape() as tape:
            loss = mean(y, self(-x, training=True))
        return self.learn(tape, loss)


class Makes(Adversaries):
    """Makes a layer in each call, and has one that it does not call, which stays unbuilt."""

    def __init__(self):
        super().__init__()
        self.unused = layers.Dense(2)

    def call(self, x, training=False):
        return layers.Activation("tanh")(super().call(x, training=training))


class Draws(Adversaries):
    """Draws by `tf.random`, by row."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + tf.random.normal(tf.shape(x), stddev=0.1) * tf.random.uniform((1,)), y))


def trained(make, devices, rows=19, batch=8, metrics=None, **compiled):
    """The weights, logs and results of two epochs."""
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model = make()
        if not model.built and isinstance(model, Classifier):
            model.build((None, 6))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if isinstance(model, Judged) else None
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, **compiled)
    logs = model.fit(X[:rows], Y[:rows], batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    if loss is not None:
        logs |= model.evaluate(X[:rows], Y[:rows], batch_size=batch, verbose=0, return_dict=True)
    return model.get_weights(), logs


def assert_alike(one, other):
    for here, there in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(here, there, atol=3e-6, rtol=2e-5)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_allclose(values, other[1][name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.sample("Mixes")
@pytest.mark.parametrize(
    "make",
    [Divides, Clips, Pairs, Sharpness, Queue, Kept, Attacked, Mixes, Penalized, Function, Words, Judged, Compares],
    ids=lambda make: make.__name__,
)
def test_a_step_that_mixes_rows_is_one_device_s(make, caplog):
    alone = trained(make, None, metrics=["accuracy"] if make is Judged else None)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        spread = trained(make, ["CPU:0", "CPU:1"], metrics=["accuracy"] if make is Judged else None)
    assert_alike(alone, spread)
    said = [record.getMessage() for record in caplog.records if "`" + make.__name__ in record.getMessage()]
    assert len(said) == 1 and SEEN in said[0].lower()
    assert make is Words or "could not be tried" not in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "batch", "compiled"),
    [(17, 1, {}), (16, 8, {"steps_per_execution": 4}), (16, 8, {"jit_compile": True}), (16, 8, {"run_eagerly": True})],
    ids=["fewer rows than replicas", "many steps a call", "XLA", "eager"],
)
def test_ways_to_run(rows, batch, compiled):
    one, other = (trained(Clips, devices, rows, batch, **compiled) for devices in (None, ["CPU:0", "CPU:1"]))
    assert_alike(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 14])
def test_one_batch_of_a_static_size(rows):
    one, other = (trained(Attacked, devices, rows, rows) for devices in (None, ["CPU:0", "CPU:1"]))
    assert_alike(one, other)


@pytest.mark.slow
def test_four_replicas():
    assert_alike(trained(Attacked, None), trained(Attacked, ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Adversaries, Makes])
def test_a_step_by_rows_stays_so(make, caplog):
    alone = trained(make, None)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert_alike(alone, trained(make, ["CPU:0", "CPU:1"]))
    assert not [record for record in caplog.records if make.__name__ in record.getMessage()]


@pytest.mark.slow
def test_numbers_of_tf_random_do_not_look_like_mixed_rows(caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        trained(Draws, ["CPU:0", "CPU:1"])
    (said,) = [record.getMessage() for record in caplog.records if "`Draws" in record.getMessage()]
    assert "tf.random" in said and SEEN not in said


@pytest.mark.slow
def test_what_the_user_says_is_not_tried(caplog):
    class Marked(Clips):
        @tfgpu.by_rows
        def train_step(self, data):
            return super().train_step(data)

    alone = trained(Clips, None)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        marked = trained(Marked, ["CPU:0", "CPU:1"])
    assert not [record for record in caplog.records if "Marked" in record.getMessage()]
    assert abs(marked[1]["norm"][0] - alone[1]["norm"][0]) > 1e-3  # each replica clips by its own norm


def test_a_step_that_cannot_be_tried_is_refused_where_that_is_asked_for():
    class Reads(Classifier):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mean(y, self(x, training=True)) + float("nan" if ops.shape(x)[0] == 7 else 0)
            return self.learn(tape, loss)

    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"], unproven="refuse").scope():
        model = Reads()
        model.build((None, 6))
        model.compile("sgd")
    with pytest.raises(InputError, match=r"Reads.train_step.*by_rows"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
