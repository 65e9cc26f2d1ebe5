"""Custom losses and metrics that need all rows of a batch: two and four replicas equal one device."""

import functools
import itertools
import logging
import queue
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu import repairs
from tfgpu.compat import slots

X = np.random.default_rng(1).normal(size=(22, 5)).astype("float32")
Y = (X[:, :1] + X[:, 1:2] > 0).astype("float32")


def dice(y, p):
    """As people write it, for binary masks."""
    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)


def root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def of_positives(y, p):
    """A mean over some of the rows."""
    found = ops.binary_crossentropy(y, p)
    return ops.sum(found * y) / ops.maximum(ops.sum(y), 1.0)


def total(y, p):
    return tf.reduce_sum(tf.square(y - p))


def from_center(y, p):
    """A number a row that depends on the others."""
    return ops.mean(ops.square(p - ops.mean(p, axis=0)) + ops.square(y - p), axis=-1)


def each_with_each(y, p):
    """A row for each row, with a number for each other one: an axis too many, as it happens."""
    return ops.square(y[:, None] - p)


def by_column(y, p):
    """A number for each output of the model: of all rows."""
    return 1 - ops.sum(y * p, axis=0) / ops.sum(y + p, axis=0)


class Correlation(keras.losses.Loss):
    def call(self, y_true, y_pred):
        y, p = y_true - ops.mean(y_true), y_pred - ops.mean(y_pred)
        return 1 - ops.sum(y * p) / (ops.norm(y) * ops.norm(p) + 1e-3)


class Scaled(Correlation):
    def call(self, labels, outputs, by=1.0):
        return by * super().call(y_true=labels, y_pred=outputs)


class Halved(Scaled):
    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred, by=0.5)


class Weighed:
    """Callable, and no function."""

    def __call__(self, y, p):
        return ops.sum((y - p) ** 2) / (1 + ops.sum(y))


def recall(y, p):
    return ops.sum(y * ops.round(p)) / (ops.sum(y) + 1e-7)


def right(y, p):
    return ops.equal(y, ops.round(p))[:, 0]


def determination(y, p):
    return 1 - ops.sum(ops.square(y - p)) / ops.sum(ops.square(y - ops.mean(y)))


def trained(
    strategy, loss, metrics=(), *, weights=None, run_eagerly=False, jit=False, step=None, policy=None, labels=Y
):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy or "float32")
    try:
        with strategy.scope():
            keras.utils.set_random_seed(0)
            width = labels.shape[-1]
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(width, "sigmoid", dtype="float32")]
            inputs = keras.Input((5,))
            outputs = inputs
            for layer in layers:
                outputs = layer(outputs)
            model = type("Model", (keras.Model,), {"train_step": step} if step else {})(inputs, outputs)
            how = {"metrics": list(metrics), "weighted_metrics": list(metrics) if weights is not None else []}
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            loss = loss() if isinstance(loss, type) else loss  # one with variables is made where the model is
            model.compile(optimizer, loss, run_eagerly=run_eagerly, jit_compile=jit, **how)
        held_back = X[:9], labels[:9]
        settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": held_back}
        history = model.fit(X, labels, sample_weight=weights, **settings)
        return model.get_weights(), history.history
    finally:
        keras.config.set_dtype_policy(before)


def check(loss, metrics=(), *, replicas=(2, 4), close=2e-6, **how):
    """Batches of 8, 8 and 6 rows; of the last, four replicas have 2, 2, 1 and 1."""
    weights, history = trained(tfgpu.strategy("one_device", devices=["CPU:0"]), loss(), metrics, **how)
    for count in replicas:
        found, told = trained(tfgpu.strategy("mirrored", devices=count), loss(), metrics, **how)
        assert max(np.abs(a - b).max() for a, b in zip(weights, found, strict=True)) <= close, count
        assert history.keys() == told.keys()
        for name, values in history.items():
            assert told[name] == pytest.approx(values, abs=10 * close), (count, name)


def own():
    functions = dice, from_center, root, of_positives, total, each_with_each, by_column
    for loss in (*functions, Correlation(), Halved(), Weighed()):
        name = getattr(loss, "__name__", type(loss).__name__)
        yield pytest.param(loss, id=name, marks=() if loss in (dice, from_center) else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("loss", list(own()))
def test_two_and_four_replicas_are_one_device(loss):
    check(lambda: loss)


@pytest.mark.slow
def test_stock_keras_learns_other_weights(monkeypatch):
    """What the repair is for: without it each replica's loss is that of its own rows."""
    monkeypatch.setattr("tfgpu.core.row_mixing.gathering.may_meet", lambda: False)
    with pytest.raises(AssertionError):
        check(lambda: dice)


@pytest.mark.slow
def test_metrics():
    check(lambda: "mse", (recall, by_column, from_center, right), replicas=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_labels_of_any_kind(dtype):
    def kept(y, p):
        assert y.dtype == dtype
        y = ops.cast(y, "float32")
        return ops.sum(y * p) / ops.sum(y + p)

    found = []
    for strategy in (tfgpu.strategy("one_device", devices=["CPU:0"]), tfgpu.strategy("mirrored", devices=4)):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
            model.compile("sgd", "mse", metrics=[kept])
        found.append(model.evaluate(X, Y.astype(dtype), batch_size=8, verbose=0))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
def test_more_metrics():
    check(lambda: "mse", (recall, determination, dice, by_column, from_center, "mae"))


@pytest.mark.slow
def test_weights_of_rows():
    draw = np.random.default_rng(3).uniform(0.2, 2.0, len(X)).astype("float32")
    for loss in (dice, from_center):
        check(lambda loss=loss: loss, (from_center,), weights=draw)  # Keras weighs no metric of one number


@pytest.mark.slow
def test_eager_steps_and_compiled_ones():
    check(lambda: dice, (recall,), run_eagerly=True, replicas=(2,))
    check(lambda: dice, (recall,), jit=True, replicas=(2,), close=1e-5)


@pytest.mark.slow
def test_half_precision():
    check(lambda: dice, (recall,), policy="mixed_bfloat16", replicas=(2,), close=2e-2)


def own_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True))
    self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
    return {"loss": loss}


@pytest.mark.slow
def test_in_a_custom_step():
    for loss in (dice, from_center, total):
        check(lambda loss=loss: loss, step=own_step)


def test_steps_in_one_call():
    """Rows that are known beforehand let many steps run in one call of the compiled loop."""
    with (strategy := tfgpu.strategy("mirrored", devices=2)).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", dice)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    model.fit(data.repeat(), steps_per_epoch=6, verbose=0)
    assert model.train_function.loops.has_varying_shapes is False
    assert strategy is model.distribute_strategy


class Counts:
    """Counts its calls outside the model's step, and notes the rows that it gets within."""

    def __init__(self, function):
        self.function, self.__name__ = function, function.__name__
        self.rows, self._tries = set(), queue.SimpleQueue()  # which no trial puts back

    @property
    def tries(self):
        return self._tries.qsize()

    def __call__(self, y, p):
        if tf.executing_eagerly():
            self._tries.put(None)
        else:
            self.rows.add(p.shape[0])
        return self.function(y, p)


def square(y, p):
    return ops.mean(ops.square(y - p))


def squares(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


@pytest.mark.parametrize("function", [square, squares])
def test_a_mean_over_rows_stays_on_its_replica(function, caplog):
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", counts := Counts(function))
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    assert counts.tries and counts.rows == {4} and not caplog.records
    tries = counts.tries
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    assert counts.tries == tries  # once is enough


def test_a_function_that_gathers_by_itself_is_left_alone(caplog):
    def gathers(y, p):
        here = tf.distribute.get_replica_context()  # none where Keras builds the model
        return ops.sqrt(ops.mean(ops.square(p if here is None else here.all_gather(p, axis=0))))

    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[counts := Counts(gathers)])
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    assert counts.tries == 1 and counts.rows == {4} and not caplog.records


def test_one_device_runs_no_trial():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", counts := Counts(dice))
    repairs.repair_keras()
    model.fit(X, Y, batch_size=11, verbose=0)
    assert not counts.tries


def test_the_trial_is_logged(caplog):
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", dice, metrics=[recall])
    with caplog.at_level(logging.WARNING, "tfgpu"):
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("The loss 'dice' is not a mean over the rows of a batch.")
    assert said[1].startswith("The metric 'recall' is not a mean")


def test_a_failed_trial_is_named(caplog):
    def fussy(y, p):
        if tf.executing_eagerly():
            raise ValueError("not with these numbers")
        return ops.mean(ops.square(y - p))

    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", fussy)
    with caplog.at_level(logging.WARNING, "tfgpu"):
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    (said,) = [record.message for record in caplog.records]
    assert "'fussy' could not be tried (ValueError: not with these numbers)" in said


def test_a_try_changes_no_state():
    """A loss that draws and counts does both as often as on one device."""

    class Noisy(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.seeds, self.calls = keras.random.SeedGenerator(5), keras.Variable(0.0, trainable=False)

        def call(self, y_true, y_pred):
            self.calls.assign_add(1.0)
            noise = keras.random.uniform((), seed=self.seeds)
            return ops.sqrt(ops.mean(ops.square(y_true - y_pred))) * (1 + 0.0 * noise)

    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", loss := Noisy())
        before = ops.convert_to_numpy(loss.seeds.state)
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    assert float(loss.calls) == 2
    assert ops.convert_to_numpy(loss.seeds.state).tolist() != before.tolist()


@pytest.mark.slow
def test_labels_that_stand_for_none_are_tried():
    """A mean over the labels that are not -100, as for tokens that are not to be guessed."""

    def masked(y, p):
        kept = ops.cast(y != -100.0, "float32")
        return ops.sum(ops.square(y - p) * kept) / ops.maximum(ops.sum(kept), 1.0)

    labels = Y.copy()
    labels[::3] = -100.0
    labels[3:6] = -100.0
    found = []
    for strategy in (tfgpu.strategy("one_device", devices=["CPU:0"]), tfgpu.strategy("mirrored", devices=4)):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), masked)
        model.fit(X, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) <= 1e-6


class Of(keras.losses.Loss):
    def __init__(self, function, **how):
        super().__init__(**how)
        self.function = function

    def call(self, y_true, y_pred):
        return self.function(y_true, y_pred)


def square_by_column(y, p):
    return ops.mean(ops.square(y - p), axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("function", [square_by_column, by_column])
def test_several_numbers_of_the_batch_are_no_rows_to_add_up(function, reduction):
    labels = np.concatenate([Y, 1 - Y, Y], axis=1)
    check(lambda: Of(function, reduction=reduction), labels=labels, replicas=(2,))


@pytest.mark.slow
def test_a_mean_of_one_number_with_weights_of_rows():
    """Keras multiplies the batch's number by each row's weight."""
    check(lambda: square, weights=np.random.default_rng(3).uniform(0.2, 2.0, len(X)).astype("float32"), replicas=(2,))


@pytest.mark.slow
def test_a_mean_of_one_number_with_a_mask():
    tokens = np.random.default_rng(3).integers(0, 4, (22, 6))
    found = []
    for strategy in (tfgpu.strategy("one_device", devices=["CPU:0"]), tfgpu.strategy("mirrored", devices=4)):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile(keras.optimizers.SGD(0.1), square)
        model.fit(tokens, tokens[..., None] / 4, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) <= 1e-6


MISSING = -9999.0


def without_missing(y, p):
    kept = ops.cast(y != MISSING, "float32")
    return ops.sum(ops.square(y - p) * kept) / ops.maximum(ops.sum(kept), 1.0)


def without_nan(y, p):
    kept = ~ops.isnan(y)
    return ops.sum(ops.where(kept, ops.square(ops.where(kept, y, 0.0) - p), 0.0)) / ops.sum(ops.cast(kept, "float32"))


def worst(y, p, most=10):
    found = ops.reshape(ops.square(y - p), [-1])
    return ops.mean(tf.math.top_k(found, tf.minimum(most, tf.size(found))).values)


def in_rows_of_twelve(y, p):
    """A number of the shape is in it; a row of labels has none in common with drawn ones of another length."""
    y, p = ops.reshape(y, [-1, 12]), ops.reshape(p, [-1, 12])
    kept = ops.cast(y != -100.0, "float32")
    return ops.sum(ops.square(y - p) * kept) / ops.maximum(ops.sum(kept), 1.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("function", "width", "needs"),
    [
        (without_missing, 1, "ALL"),
        (without_nan, 1, "ALL"),
        (worst, 1, "ALL"),
        (functools.partial(worst, most=500), 1, "ALL"),
        (in_rows_of_twelve, 12, "ALL"),
        (lambda y, p: ops.mean(y - p), 3, "ITS_MEAN"),  # what is nearly 0 has rounding that is large for it
        (lambda y, p: tf.reduce_sum(y - p + tf.random.normal(tf.shape(p))), 1, "ALL"),
        (lambda y, p: ops.mean(ops.square(ops.reshape(y - p, [-1, 3, 2]))), 2, "ALL"),  # three rows together
    ],
)
def test_verdicts(function, width, needs):
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(width)])
        model.compile(keras.optimizers.SGD(0.0), loss := Of(function))
    model.fit(X[:12], np.repeat(Y[:12], width, 1), batch_size=12, verbose=0)
    assert set(slots.get(loss, "needs").values()) == {needs}


@pytest.mark.slow
def test_losses_of_keras_and_draws_within():
    error = keras.losses.MeanSquaredError()

    class Noisy(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(5)

        def call(self, y_true, y_pred):
            noise = 0.1 * keras.random.normal(ops.shape(y_pred), seed=self.seeds)
            return ops.sqrt(error(y_true + noise, y_pred)) + error(y_true, y_pred) ** 2

    check(Noisy, replicas=(2,))
    check(Noisy, replicas=(2,), run_eagerly=True)


@pytest.mark.slow
def test_a_weight_that_grows_from_nothing():
    class Growing(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.by = keras.Variable(0.0, trainable=False)

        def call(self, y_true, y_pred):
            self.by.assign_add(1.0)
            return ops.mean(ops.square(y_true - y_pred)) + self.by * dice(y_true, y_pred)

    check(lambda: Growing, replicas=(2,))


@pytest.mark.slow
def test_labels_by_name():
    class Two(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.sqrt(ops.mean(ops.square(y_true["a"] - y_pred["a"])) + ops.mean(ops.abs(y_pred["b"])))

    two = Two()

    def step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = two({"a": y}, {"a": found, "b": found})
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    check(lambda: "mse", step=step, replicas=(2,))


def test_a_try_leaves_random_numbers_as_they_would_be():
    def draws(y, p):
        random.random(), np.random.rand(), tf.random.uniform(())
        return ops.mean(ops.square(y - p))

    def drawn(loss):
        with tfgpu.strategy("mirrored", devices=2).scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.compile("sgd", loss)
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
        return random.random(), np.random.rand(), float(tf.random.uniform(()))

    def draws_in_the_step_alone(y, p):
        """The second replica draws what the first one does."""
        here = tf.distribute.get_replica_context()
        is_second = here is not None and tf.get_static_value(here.replica_id_in_sync_group) == 1
        return ops.mean(ops.square(y - p)) if tf.executing_eagerly() or is_second else draws(y, p)

    assert drawn(draws) == drawn(draws_in_the_step_alone)


class Focused(keras.losses.Loss):
    """Rows that are more wrong than the others count more."""

    def __init__(self, of_row):
        super().__init__()
        self.of_row = of_row

    def call(self, y_true, y_pred):
        found = self.of_row(y_true, y_pred)
        return found * tf.stop_gradient(found / tf.reduce_mean(found))


class FocusedStep(keras.Model):
    of_row = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.of_row(y, self(x, training=True))
            loss = tf.reduce_mean(found * tf.stop_gradient(found / tf.reduce_mean(found)))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Mixed(keras.layers.Layer):
    """Centers the logits over the batch."""

    def call(self, x):
        return keras.activations.softmax(x - 0.5 * ops.mean(x, 0))


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("way", "activation"), [*itertools.product(["loss", "train_step"], ["softmax", "sigmoid"]), ("layer", "softmax")]
)
def test_rows_of_other_replicas_have_their_logits(way, activation, policy, is_eager, caplog):
    """Without logits, Keras's cross-entropies clip probabilities that are 0, as for rows that are surely wrong."""
    of_row = keras.losses.categorical_crossentropy if activation == "softmax" else keras.losses.binary_crossentropy
    labels = np.eye(3, dtype="float32")[np.arange(22) % 3]

    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inputs = keras.Input((5,))
            large = keras.initializers.RandomNormal(stddev=40.0, seed=3)
            hidden = keras.layers.Dense(3, kernel_initializer=large, dtype=policy)(inputs)
            last = Mixed(dtype=policy) if way == "layer" else keras.layers.Activation(activation, dtype=policy)
            outputs = last(hidden)
            model = (FocusedStep if way == "train_step" else keras.Model)(inputs, outputs)
            model.of_row = of_row
            loss = Focused(of_row) if way == "loss" else keras.losses.CategoricalCrossentropy()
            model.compile(keras.optimizers.SGD(1e-3), loss, run_eagerly=is_eager)
        model.fit(X, labels, batch_size=8, shuffle=False, verbose=0)
        return np.concatenate([each.ravel() for each in model.get_weights()])

    expected = train(tfgpu.strategy("one_device"))
    close = {"rtol": 2e-6, "atol": 1e-5} if policy == "float32" else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(train(tfgpu.strategy("mirrored", 2)), expected, **close)
    assert "could not be tried" not in caplog.text
