"""Loops by hand that count one number in a metric, or sum over replicas themselves: one device's result, or named."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.core.row_mixing import scalar_updates, verdicts
from tfgpu.core.row_mixing.scalar_updates import AS_IT_IS, MEAN, PART, UNKNOWN, Scalar
from tfgpu.core.row_mixing.trials.step_recorder import Recorder

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 11)


class Loop:
    """A model, a step by hand on batches of 4, 4 and 3 rows, and metrics of one number."""

    def __init__(self, replicas, policy="float32"):
        keras.utils.set_random_seed(0)
        devices = [f"CPU:{at}" for at in range(replicas)]
        self.strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else tf.distribute.get_strategy()
        with self.strategy.scope():
            hidden, last = keras.layers.Dense(6, "tanh", dtype=policy), keras.layers.Dense(3, dtype=policy)
            self.model = keras.Sequential([keras.Input((5,)), hidden, last])
            self.optimizer = keras.optimizers.SGD(0.3)
            self.optimizer.build(self.model.trainable_variables)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.mean, self.sum = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")

    def gradients(self, tape, loss):
        return tape.gradient(loss, self.model.trainable_variables)

    def loss_of(self, y, outputs):
        return self.loss(y, outputs)

    def count(self, x, loss):
        """What the metrics count."""

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, tf.cast(self.model(x, training=True), tf.float32))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(self.gradients(tape, loss), variables, strict=True))
        self.count(x, loss)

    def run(self, *, eagerly=False):
        data = self.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))

        def run(x, y):
            self.strategy.run(self.step, args=(x, y))

        run = run if eagerly else tf.function(run)
        for x, y in data:
            run(x, y)
        return [*self.model.get_weights(), *(np.array(each.result()) for each in (self.mean, self.sum))]


def replica():
    return tf.distribute.get_replica_context()


class Losses(Loop):
    """As most loops count: `metric(loss)`."""

    def count(self, x, loss):
        self.mean(loss)
        self.sum.update_state(loss)


class Means(Loop):
    """Means over a replica's rows, and the same number everywhere."""

    def count(self, x, loss):
        self.mean.update_state(tf.reduce_mean(x))
        self.sum.update_state(1.0)


class Weighed(Loop):
    """A mean and a count of rows."""

    def count(self, x, loss):
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        self.mean.update_state(tf.math.divide_no_nan(tf.reduce_sum(x), 5 * rows), sample_weight=rows)
        self.sum.update_state(rows)


class OfFunction(Loop):
    """A function of labels and outputs that is a mean."""

    def __init__(self, *args):
        super().__init__(*args)
        with self.strategy.scope():
            self.mean = keras.metrics.MeanMetricWrapper(lambda y, p: ops.mean(ops.abs(p)), name="size")

    def count(self, x, loss):
        self.mean.update_state(x, x)


class OneName(Loop):
    """Two metrics of one name, as two `Mean()` have, that count in different ways."""

    def __init__(self, *args):
        super().__init__(*args)
        with self.strategy.scope():
            self.sum = keras.metrics.Mean(name="mean")

    def count(self, x, loss):
        self.mean.update_state(loss)
        self.sum.update_state(tf.reduce_mean(x))


class Partial(Losses):
    """Gives `strategy.run` a partial of an object that can be called."""

    def __init__(self, *args):
        super().__init__(*args)
        by_hand = self.step

        class Step:
            def __call__(self, scale, x, y):
                by_hand(x * scale, y)

        self.step = functools.partial(Step(), 1.0)


class Turns(Losses):
    """Two functions of the same code, each with a metric of its own."""

    def run(self, **how):
        with self.strategy.scope():
            first, self.mean = self.mean, keras.metrics.Mean(name="first")
        by_hand = self.step

        def made(metric):
            def step(x, y):
                self.mean = metric
                by_hand(x, y)

            return step

        self.step = made(self.mean)
        super().run(**how)
        self.step = made(first)
        return super().run(**how)


class Rate(Loop):
    """A mean and a count that are 0 on all rows that are tried, as of the right answers among a thousand classes."""

    def count(self, x, loss):
        is_right = tf.cast(x == X[9, 1], tf.float32)
        self.mean.update_state(tf.reduce_mean(is_right))
        self.sum.update_state(tf.reduce_sum(is_right))


class Within(Loop):
    """Computes the loss and counts in a tf.function of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        of_rows = super().loss_of

        @tf.function
        def inner(y, outputs):
            loss = of_rows(y, outputs)
            self.mean.update_state(loss)
            self.sum.update_state(tf.reduce_sum(outputs) ** 0)
            return loss

        self.loss_of = inner


class Largest(Loop):
    def count(self, x, loss):
        self.mean.update_state(tf.reduce_max(x))


class SummedTwice(Loop):
    """Sums the gradients, clips them and leaves it to the optimizer to sum them again."""

    def gradients(self, tape, loss):
        found = replica().all_reduce("sum", super().gradients(tape, loss))
        return tf.clip_by_global_norm(found, 0.1)[0]


class SummedOnce(SummedTwice):
    def gradients(self, tape, loss):
        return [each / replica().num_replicas_in_sync for each in super().gradients(tape, loss)]


class Spread(Loop):
    """Compares each row with the mean over all, which it sums up itself."""

    def loss_of(self, y, outputs):
        count = replica().all_reduce("sum", tf.cast(tf.shape(outputs)[0], tf.float32))
        mean = replica().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(outputs, 0)) / count
        return tf.reduce_sum((outputs - mean) ** 2) / count + super().loss_of(y, outputs)


class GatheredTwice(Loop):
    """Counts the loss of all rows once on each replica."""

    def loss_of(self, y, outputs):
        outputs = tfgpu.gather(outputs)
        return tf.reduce_mean((outputs - tf.reduce_mean(outputs, 0)) ** 2)


class Merged(Loop):
    def count(self, x, loss):
        replica().merge_call(lambda strategy, value: None, args=(loss,))


def assert_alike(one, other):
    for here, there in zip(one, other, strict=True):
        np.testing.assert_allclose(here, there, atol=2e-6)


EQUAL = [Losses, OneName, Partial, Turns, Means, Weighed, OfFunction, Rate, SummedOnce, Spread, Within]
NAMED = {
    Largest: "the metric 'mean' would differ",
    SummedTwice: "the gradients would differ",
    GatheredTwice: "the gradients would differ",
    Merged: "could not be tried (it calls `merge_call`)",
}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("kind", EQUAL, ids=lambda kind: kind.__name__)
def test_equal_to_one_device(kind, replicas, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert_alike(kind(replicas).run(), kind(1).run())
    assert "strategy.run" not in caplog.text


@pytest.mark.slow
def test_eager_loops_count_once():
    assert_alike(Losses(2).run(eagerly=True), Losses(1).run(eagerly=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
def test_named_before_the_first_step(kind, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        kind(2).run()
    said = [record.getMessage() for record in caplog.records if "strategy.run" in record.getMessage()]
    assert len(said) == 1 and NAMED[kind] in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_nothing_is_said_of_rounding_in_16_bits(policy, caplog):
    loop = Loop(2, policy)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        loop.run()
    functions = [piece.verdict for piece in verdicts.of(loop.strategy) if piece.name.startswith("function")]
    assert functions == [verdicts.BY_ROWS] and "strategy.run" not in caplog.text


def test_a_model_is_as_narrow_as_its_layers():
    """A model in float16 whose last layer gives float32, as Keras advises."""
    recorder = Recorder(1.0, 0, 4)

    def model():
        recorder.noting_outputs(lambda: tf.zeros((4, 2), tf.float16))
        return tf.zeros((4, 3))

    recorder.noting_outputs(model)
    assert recorder.is_narrow and recorder.bytes_a_row == 3 * 4


def scalars(*values, weights=None, is_sum=False):
    return [Scalar("a", value, weight, is_sum) for value, weight in zip(values, weights or [1.0, 1.0], strict=False)]


@pytest.mark.parametrize(
    ("whole", "parts", "expected"),
    [
        (scalars(3.0), scalars(1.0, 2.0), {PART}),
        (scalars(1.75), scalars(1.0, 2.0), {MEAN}),
        (scalars(1.0), scalars(1.0, 1.0), {MEAN}),
        (scalars(1.75, weights=[8.0]), scalars(1.0, 2.0, weights=[2.0, 6.0]), {AS_IT_IS}),
        (scalars(2.0), scalars(1.0, 2.0), set()),
        (scalars(3.0, is_sum=True), scalars(1.0, 2.0, is_sum=True), {AS_IT_IS, PART}),
        (scalars(1.0, is_sum=True), scalars(1.0, 1.0, is_sum=True), {MEAN}),
        (scalars(1.0, 2.0), scalars(1.0, 2.0), set()),
    ],
)
def test_how_a_number_counts(whole, parts, expected):
    """On replicas with a quarter and three quarters of the rows."""
    found = scalar_updates.ways(whole, [[part] for part in parts], [0.25, 0.75], 1e-6)
    assert found == {"a": expected}


def test_a_number_that_shows_nothing_has_no_way():
    fitting = scalar_updates.ways(scalars(0.0), [scalars(0.0), scalars(0.0)], [0.5, 0.5], 1e-6)
    assert scalar_updates.chosen(fitting) == {"a": UNKNOWN}


def counted(way, replicas, traced):
    """What a `Sum` and a `Mean` say of one number, `way(x, weight)`, in three batches with weights of 0, 0.5 and 1."""
    devices = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        metrics = keras.metrics.Sum(name="sum"), keras.metrics.Mean(name="mean")

    def step(x, weight):
        for metric in metrics:
            metric.update_state(way(x, weight))

    run = traced(lambda x, weight: strategy.run(step, args=(x, weight)))
    for at, x in enumerate(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(4))):
        run(x, tf.constant(at / 2))
    return [float(metric.result()) for metric in metrics]


@pytest.mark.sample("rate-traced", "loss-eager")
@pytest.mark.parametrize("traced", [lambda run: run, tf.function], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "way",
    [lambda x, rate: rate, lambda x, rate: rate * tf.nn.compute_average_loss(x[:, 0], global_batch_size=4)],
    ids=["rate", "loss"],
)
def test_a_number_that_is_0_in_the_first_steps_counts_once(way, traced, caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        np.testing.assert_allclose(counted(way, 2, traced), counted(way, 1, traced), rtol=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("tfgpu")]


@pytest.mark.parametrize("rows", [8, 11])
def test_what_replicas_cannot_exchange_in_a_compiled_function_is_named(rows, caplog):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        mean, state = keras.metrics.Mean(name="mean"), keras.Variable(0.0, trainable=False, name="state")

    @tf.function(jit_compile=True)
    def inner(x):
        mean.update_state(tf.reduce_mean(x))
        state.assign_add(tf.reduce_mean(x))
        return keras.losses.MeanSquaredError()(x, x + 1)

    def step(x):
        inner(x)

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X[:rows]).batch(4))
    run = tf.function(lambda x: strategy.run(step, args=(x,)), autograph=False)
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        for x in data:
            run(x)
    said = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "cannot communicate" in text]
    uneven = ["the metric 'mean'", "a loss"] if rows == 11 else []
    assert sorted(text.split(", ")[1].split(" is in")[0] for text in said) == sorted([*uneven, "the variable 'state'"])


def test_a_number_of_rows_that_is_always_0_in_the_trial_is_named(caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        counted(lambda x, rate: tf.reduce_sum(tf.cast(tf.abs(x - X[9, 1]) < 1e-6, tf.float32)), 2, tf.function)
    said = [
        text.split(" gets")[0] for text in map(logging.LogRecord.getMessage, caplog.records) if "one number" in text
    ]
    assert said == ["The metric 'sum'", "The metric 'mean'"]
    assert "counts as a sum" in caplog.text and "counts as a mean" in caplog.text


def returned(kind, traced, op):
    """What `strategy.reduce` makes of what a function returns, of two replicas and of one device."""
    found = []
    for replicas in (2, 1):
        loop = Loop(replicas)

        def step(x, y, loop=loop):
            outputs = loop.model(x)
            return loop.loss(y, outputs) if kind == "loss" else tf.reduce_mean(outputs)

        inner = tf.function(step) if traced == "inner" else step

        def run(x, y, loop=loop, inner=inner):
            return loop.strategy.reduce(op, loop.strategy.run(inner, args=(x, y)), axis=None)

        run = tf.function(run) if traced == "outer" else run
        data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4)
        found.append([float(run(x, y)) for x, y in loop.strategy.experimental_distribute_dataset(data)])
    return found


@pytest.mark.parametrize("traced", ["outer", "inner", "nothing"])
@pytest.mark.parametrize(("kind", "op"), [("loss", "MEAN"), ("loss", tf.distribute.ReduceOp.MEAN), ("loss", "SUM")])
def test_a_mean_of_shares_is_named(kind, op, traced, caplog):
    found, expected = returned(kind, traced, op)
    is_mean = op != "SUM"
    assert caplog.text.count("share of it") == is_mean
    np.testing.assert_allclose(np.multiply(found, 2 if is_mean else 1), expected, rtol=1e-5)


def test_a_mean_of_means_is_one_devices(caplog):
    found, expected = returned("mean", "outer", "MEAN")
    assert "share of it" not in caplog.text
    np.testing.assert_allclose(found, expected, rtol=1e-5)
