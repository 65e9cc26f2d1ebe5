"""Code as people write it: replicas give what one device gives, or a warning names it before the first step."""

import contextlib
import logging
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu.core.row_mixing.trials.isolation import Sandbox
from tfgpu.core.row_mixing.trials.step_recorder import Recorder

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 11)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Own(keras.Model):
    """Three classes; subclasses change the loss."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def loss_of(self, x, y):
        return CROSS_ENTROPY(y, self(x, training=True))

    def gradients(self, tape, loss):
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(x, y)
        self.optimizer.apply(self.gradients(tape, loss), self.trainable_variables)
        return {"cost": loss if not isinstance(loss, tuple) else sum(loss)}


class WarmSmoothing(Own):
    """Labels are smoothed more and more, by a count of steps."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def loss_of(self, x, y):
        self.steps += 1
        rate = min(0.3, 0.1 * self.steps)
        soft = ops.one_hot(y, 3) * (1 - rate) + rate / 3
        return ops.mean(keras.losses.categorical_crossentropy(soft, self(x, training=True), from_logits=True))


class EveryOther(Own):
    """A penalty in every second step."""

    calls = 0

    def loss_of(self, x, y):
        self.calls += 1
        outputs = self(x, training=True)
        return CROSS_ENTROPY(y, outputs) + (ops.mean(ops.square(outputs)) if self.calls % 2 == 0 else 0.0)


class LastBatch(Own):
    """Compares rows with those of the last batch, kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = None, []

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        loss = CROSS_ENTROPY(y, outputs) * (2.0 if len(self.seen) > 2 else 1.0)
        if self.last is not None:
            loss = loss + ops.mean(ops.square(ops.matmul(outputs, ops.transpose(self.last))))
        self.last = ops.stop_gradient(outputs)
        self.seen.append(1)
        return loss


class HeldGenerator(Own):
    """Noise from a NumPy generator, for each row and for the batch."""

    def __init__(self):
        super().__init__()
        self._rng = np.random.default_rng(3)

    def loss_of(self, x, y):
        x = x + self._rng.normal(size=(x.shape[0] or 1, 5)).astype("float32")
        return super().loss_of(x, y) * float(self._rng.uniform(0.5, 1.5))


class GeneratorWithin(Own):
    """A factor from a NumPy generator in a list in a dict."""

    def __init__(self):
        super().__init__()
        self.sources = {"noise": [np.random.default_rng(3)]}

    def loss_of(self, x, y):
        return super().loss_of(x, y) * float(self.sources["noise"][0].uniform(0.5, 1.5))


class FromData(Own):
    """Has more data than `fit` gives it."""

    def __init__(self):
        super().__init__()
        self.more = iter(tf.data.Dataset.from_tensor_slices(X[::-1].copy()).batch(4).repeat())

    def loss_of(self, x, y):
        return super().loss_of(x, y) + ops.mean(ops.square(self(next(self.more))))


class FromPython(Own):
    """Takes a factor from an iterator in a list."""

    def __init__(self):
        super().__init__()
        self.factors = [iter([0.5, 1.0, 2.0] * 5)]

    def loss_of(self, x, y):
        return super().loss_of(x, y) * next(self.factors[0])


class Surgery(Own):
    """PCGrad: of one task's gradient, what lies against the other's is taken away."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        return CROSS_ENTROPY(y, outputs), ops.mean(ops.square(outputs[:, 0] - x[:, 0]))

    def gradients(self, tape, loss):
        one, other = (tape.gradient(each, self.trainable_variables) for each in loss)
        dot = sum(ops.sum(a * b) for a, b in zip(one, other, strict=True))
        share = ops.minimum(dot, 0.0) / (sum(ops.sum(ops.square(b)) for b in other) + 1e-8)
        return [a - share * b + b for a, b in zip(one, other, strict=True)]


class HardTriplets(Own):
    """Each row's farthest of its class, and its nearest of another."""

    def loss_of(self, x, y):
        z = self(x, training=True)
        far, same = ops.sum(ops.square(z[:, None] - z[None]), -1), ops.cast(y[:, None] == y[None], "float32")
        nearest = ops.minimum(ops.min(far + 1e6 * same, 1), 10.0)
        return ops.mean(ops.relu(ops.max(far * same, 1) - nearest + 0.5))


class Curriculum(Own):
    """Hard rows count more from step to step, by the optimizer's count."""

    def loss_of(self, x, y):
        each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        share = ops.minimum(1.0, ops.cast(self.optimizer.iterations, "float32") / 4.0)
        return ops.mean(each * (share + (1 - share) * ops.cast(ops.stop_gradient(each) < 1.0, "float32")))


class Hardest(keras.losses.Loss):
    """The focal loss of the hardest rows of a batch."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, y, outputs):
        p = ops.sum(ops.softmax(outputs) * ops.one_hot(ops.reshape(y, (-1,)), 3), -1)
        each = -ops.square(1 - p) * ops.log(p)
        return ops.mean(tf.math.top_k(each, ops.shape(each)[0] // 2 + 1)[0])


class WarmLoss(keras.losses.Loss):
    """Its labels are smoothed more and more, by a count of its calls."""

    calls = 0

    def call(self, y, outputs):
        self.calls += 1
        rate = min(0.3, 0.1 * self.calls)
        soft = ops.one_hot(ops.reshape(y, (-1,)), 3) * (1 - rate) + rate / 3
        return keras.losses.categorical_crossentropy(soft, outputs, from_logits=True)


class Depth(layers.Layer):
    """Stochastic depth, by Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(5)

    def call(self, x, training=False):
        return x if training and random.random() < 0.5 else x + self.inner(x)


class Scaled(Depth):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(3)

    def call(self, x, training=False):
        return x + self.inner(x) * (self.rng.random() if training else 1.0)


@tf.custom_gradient
def with_unit_gradient(x):
    return tf.identity(x), lambda upstream: upstream / (tf.norm(upstream) + 1e-6)


class UnitGradient(layers.Layer):
    """Its gradient is as long as 1, over the whole batch."""

    def call(self, x):
        return with_unit_gradient(x)


class Running(layers.Layer):
    """Normalizes by moments that it keeps."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.variance = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
            self.variance.assign(0.9 * self.variance + 0.1 * ops.var(x, 0))
        return (x - self.mean) / ops.sqrt(self.variance + 1e-3)


class Counting(layers.Layer):
    """Divides by a count of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x / (1 + 0.1 * self.calls)


class Late(keras.Model):
    """Is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.counting, self.last = layers.Dense(6), Counting(), layers.Dense(3)

    def call(self, x):
        return self.last(self.counting(self.first(x)))


class OfNumpy(keras.metrics.Metric):
    """Keeps its state in Python and NumPy."""

    def __init__(self):
        super().__init__(name="of_numpy")
        self.hits, self.table = 0.0, np.zeros(3)

    def update_state(self, y, outputs, sample_weight=None):
        best = np.argmax(np.asarray(outputs), -1)
        self.hits += float(np.mean(best == np.asarray(y).reshape(-1)))
        self.table[int(best[0])] += 1

    def result(self):
        return self.hits + self.table.max() / 8.0

    def reset_state(self):
        self.hits, self.table[:] = 0.0, 0.0


def adapted():
    layer = layers.Normalization()
    layer.adapt(X)
    return keras.Sequential([keras.Input((5,)), layer, layers.Dense(3)])


def with_layer(layer):
    return lambda: keras.Sequential([keras.Input((5,)), layer(), layers.Dense(3)])


def answer(make, replicas, *, eager=False, loss=CROSS_ENTROPY, metrics=None):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    devices = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = make()
        is_own = isinstance(model, Own)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(
            optimizer,
            loss=None if is_own else loss() if isinstance(loss, type) else loss,
            metrics=metrics and [each() for each in metrics],
            run_eagerly=eager,
        )
    random.seed(5)
    logs = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return logs, model.get_weights()


def assert_equal(found, expected):
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    for mine, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


EQUAL = {
    "count": (WarmSmoothing, {"eager": True}),
    "every-other": (EveryOther, {"eager": True}),
    "loss-that-counts": (with_layer(Running), {"eager": True, "loss": WarmLoss}),
    "last-batch": (LastBatch, {"eager": True}),
    "layer-that-counts": (with_layer(Counting), {"eager": True}),
    "late-layer-that-counts": (Late, {"eager": True}),
    "held-generator": (HeldGenerator, {"eager": True}),
    "generator-within": (GeneratorWithin, {"eager": True}),
    "stochastic-depth": (with_layer(Depth), {"eager": True}),
    "scaled-at-random": (with_layer(Scaled), {"eager": True}),
    "metric-of-numpy": (with_layer(Running), {"eager": True, "metrics": [OfNumpy]}),
    "surgery": (Surgery, {}),
    "hard-triplets": (HardTriplets, {}),
    "curriculum": (Curriculum, {}),
    "hardest": (with_layer(Running), {"loss": Hardest}),
    "adapted": (adapted, {}),
}


FOUR = "last-batch", "stochastic-depth", "hard-triplets", "hardest"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "replicas"), [*((each, 2) for each in EQUAL), *((each, 4) for each in FOUR)])
def test_equal_to_one_device(what, replicas):
    make, how = EQUAL[what]
    assert_equal(answer(make, replicas, **how), answer(make, 1, **how))


NAMED = {
    "count": (WarmSmoothing, "`WarmSmoothing.train_step` changes Python state (`steps`)"),
    "held-generator": (
        HeldGenerator,
        "`HeldGenerator.train_step` draws from a generator of Python or NumPy (`_rng`)",
    ),
    "generator-within": (
        GeneratorWithin,
        "`GeneratorWithin.train_step` draws from a generator of Python or NumPy (`sources['noise'][0]`)",
    ),
    "loss-that-counts": (with_layer(Running), "The loss 'WarmLoss' changes Python state (`calls`)"),
    "stochastic-depth": (with_layer(Depth), "(Depth) draws from a generator of Python or NumPy (`random`)"),
    "scaled-at-random": (with_layer(Scaled), "(Scaled) draws from a generator of Python or NumPy (`rng`)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NAMED)
def test_what_python_does_in_a_trace_is_named(what, caplog):
    make, said = NAMED[what]
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        answer(make, 2, loss=WarmLoss if "loss" in what else CROSS_ENTROPY)
    assert said in caplog.text and "traces the step" in caplog.text


@pytest.mark.parametrize("kind", [FromPython, pytest.param(FromData, marks=pytest.mark.slow)])
def test_elements_of_an_iterator_are_refused_and_none_is_lost(kind):
    with pytest.raises(tfgpu.InputError, match="takes elements from an iterator.*Dataset.zip"):
        answer(kind, 2, eager=kind is FromPython)
    answer(kind, 1, eager=kind is FromPython)
    model = kind()
    with contextlib.suppress(tfgpu.InputError), Sandbox(model.loss_of).around(Recorder(1.0, 0, 7)):
        model.loss_of(X, Y)
    first = next(model.factors[0]) if kind is FromPython else next(model.more)[0]
    np.testing.assert_array_equal(first, 0.5 if kind is FromPython else X[-1])


@pytest.mark.slow
def test_a_gradient_that_is_not_linear_is_named(caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        answer(with_layer(UnitGradient), 2)
    assert "The gradient of the layer 'unit_gradient' (UnitGradient) is not linear" in caplog.text


class OwnFunction(Own):
    """Runs its step by itself."""

    def make_train_function(self, force=False):
        strategy = self.distribute_strategy

        @tf.function
        def function(iterator):
            found = strategy.run(self.train_step, args=(next(iterator),))
            return {name: strategy.reduce("mean", value, axis=None) for name, value in found.items()}

        self.train_function = function
        return function


@pytest.mark.slow
def test_a_train_function_that_is_written_whole_is_refused():
    with pytest.raises(Exception, match="Override `train_step`"):  # of AutoGraph, which tells ours
        answer(OwnFunction, 2)


@pytest.mark.slow
def test_a_function_of_run_counts_as_on_one_device():
    def losses(replicas):
        devices = [f"CPU:{at}" for at in range(replicas)]
        strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else tf.distribute.get_strategy()
        counted, rng = {"calls": 0}, np.random.default_rng(3)

        def step(x):
            counted["calls"] += 1
            return tf.reduce_mean(x) * counted["calls"] + float(rng.uniform())

        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X[:8]).batch(4))
        reduced = [strategy.reduce("mean", strategy.run(step, (x,)), axis=None).numpy() for x in data]
        assert counted["calls"] == 2
        return reduced

    np.testing.assert_allclose(losses(2), losses(1), rtol=1e-5)
