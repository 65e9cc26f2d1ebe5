"""Loops that call `strategy.run` by hand: pieces that look at several rows get all; a function that does is named."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu import InputError
from tfgpu.core.row_mixing import verdicts

X = (0.3 * np.random.default_rng(0).normal(size=(11, 5))).astype("float32")
Y = np.abs(X[:, :3])


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - ops.mean(x, 0)


class Pairs(keras.losses.Loss):
    def call(self, y_true, y_pred):
        true, found = (ops.sum(ops.square(each[:, None] - each[None]), -1) for each in (y_true, y_pred))
        return ops.mean(ops.square(true - found))


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self):
        return self.most + 0.0


def ratio(y_true, y_pred):
    return ops.sum(y_true * y_pred) / ops.sum(y_true)


class Loop:
    """A model, and a step on it that is written by hand."""

    def __init__(self, strategy, *, layer=keras.layers.Identity, loss=keras.losses.MeanSquaredError):
        keras.utils.set_random_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(4), layer(), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
            )
            self.optimizer, self.loss = keras.optimizers.SGD(0.1), loss()
            self.optimizer.build(self.model.trainable_variables)
            self.metrics = [Largest(), keras.metrics.MeanMetricWrapper(ratio, name="ratio")]

    def loss_of(self, y, outputs):
        return self.loss(y, outputs)

    def changed(self, gradients):
        return gradients

    def step(self, x, y):
        with tf.GradientTape() as tape:
            outputs = self.model(x, training=True)
            loss = self.loss_of(y, outputs)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(self.changed(tape.gradient(loss, variables)), variables, strict=True))
        for metric in self.metrics:
            metric.update_state(y, outputs)
        return loss

    def run(self, step=None, *, eagerly=False):
        """Trains on batches of 8 and 3 rows; returns the weights and results."""
        step = step or self.step
        data = self.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))

        def run(x, y):
            return self.strategy.run(step, args=(x, y))

        run = run if eagerly else tf.function(run)
        for x, y in data:
            run(x, y)
        return [*self.model.get_weights(), *(np.array(metric.result()) for metric in self.metrics)]


class Normalized(Loop):
    def loss_of(self, y, outputs):
        mask = ops.cast(y > 0.1, "float32")
        return ops.sum(ops.square(y - outputs) * mask) / (1.0 + ops.sum(mask))


class Clipped(Loop):
    def changed(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [gradient / tf.maximum(norm, 0.1) for gradient in gradients]


class Bounded(Loop):
    """Clips where the norm is larger than that of any drawn rows' gradients."""

    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 100.0)[0]


class BoundedTogether(Bounded):
    """Clips what is summed over replicas."""

    def changed(self, gradients):
        count = self.strategy.num_replicas_in_sync
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        return [each / count for each in super().changed(gradients)]


class Floored(Loop):
    """Makes gradients longer where the norm is smaller than that of any drawn rows' gradients."""

    def changed(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [each * tf.maximum(1.0, 1e-2 / norm) for each in gradients]


class Divided(Loop):
    """As TensorFlow's guide has it."""

    def loss_of(self, y, outputs):
        return tf.nn.compute_average_loss(ops.mean(ops.square(y - outputs), -1), global_batch_size=8)


class Gathered(Loop):
    def loss_of(self, y, outputs):
        y, outputs = tfgpu.gather(y), tfgpu.gather(outputs)
        return ops.sum(ops.square(y - outputs)) / ops.sum(y) / self.strategy.num_replicas_in_sync


def one_device():
    return tfgpu.strategy("one_device", devices=["CPU:0"])


def two_devices(**how):
    return tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"], **how)


def functions(strategy):
    return [piece.verdict for piece in verdicts.of(strategy) if piece.name.startswith("function")]


def assert_alike(one, other):
    for here, there in zip(one, other, strict=True):
        np.testing.assert_allclose(here, there, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces", [{"layer": Centered, "loss": Pairs}, {"loss": keras.losses.Dice}], ids=["own", "dice"]
)
def test_pieces_that_mix_rows_get_all(pieces, caplog):
    strategy = two_devices()
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert_alike(Loop(one_device(), **pieces).run(), Loop(strategy, **pieces).run())
    assert functions(strategy) == [verdicts.BY_ROWS] and "strategy.run" not in caplog.text


@pytest.mark.slow
def test_pieces_that_mix_rows_get_all_eagerly_and_in_a_function():
    expected = Loop(one_device(), layer=Centered, loss=Pairs).run()
    assert_alike(expected, Loop(two_devices(), layer=Centered, loss=Pairs).run(eagerly=True))
    loop = Loop(two_devices(), layer=Centered, loss=Pairs)
    assert_alike(expected, loop.run(tf.function(loop.step), eagerly=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Clipped, Normalized])
def test_a_function_that_mixes_rows_is_named_once(kind, caplog):
    strategy = two_devices()
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        kind(strategy).run()
    said = [record.getMessage() for record in caplog.records if "strategy.run" in record.getMessage()]
    assert len(said) == 1 and "`step`" in said[0] and "the gradients would differ" in said[0]
    assert "tfgpu.gather" in said[0] and functions(strategy) == [verdicts.NOT_AS_ONE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Divided, Gathered])
def test_nothing_is_said_of_a_function_that_is_right(kind, caplog):
    strategy = two_devices()
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        kind(strategy).run()
    assert functions(strategy) == [verdicts.BY_ROWS] and "strategy.run" not in caplog.text


def test_a_function_that_mixes_rows_is_refused_where_that_is_asked_for():
    loop = Clipped(two_devices(unproven="refuse"))
    before = [weight.copy() for weight in loop.model.get_weights()]
    loop.metrics = []
    with pytest.raises(InputError, match=r"`step` of `strategy.run`.*'refuse'.*tfgpu\.gather"):
        loop.run(eagerly=True)
    assert_alike(before, loop.model.get_weights())


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Bounded, verdicts.NOT_AS_ONE),
        pytest.param(Floored, verdicts.NOT_AS_ONE, marks=pytest.mark.slow),
        pytest.param(BoundedTogether, verdicts.BY_ROWS, marks=pytest.mark.slow),
    ],
)
def test_what_a_function_would_do_with_large_and_small_gradients(kind, verdict, caplog):
    loop = kind(two_devices())
    loop.metrics = []
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        loop.run()
    assert functions(loop.strategy) == [verdict]
    is_named = "the gradients, where gradients are large or small, would differ" in caplog.text
    assert is_named == (verdict == verdicts.NOT_AS_ONE)


@pytest.mark.slow
def test_marks_of_a_function(caplog):
    loop = Clipped(two_devices())
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        loop.run(tfgpu.by_rows(loop.step))
    assert "strategy.run" not in caplog.text and functions(loop.strategy) == [verdicts.BY_ROWS]
    with pytest.raises(InputError, match=r"on_all_rows.*does not apply.*tfgpu\.gather"):
        loop.run(tfgpu.on_all_rows(lambda x, y: loop.step(x, y)), eagerly=True)


def test_a_loss_of_one_number_must_not_be_divided_too(caplog):
    """The trial cannot tell a loss that is divided by 2 replicas from one that is half as large on one device."""

    class Halved(Loop):
        def loss_of(self, y, outputs):
            return super().loss_of(y, outputs) / self.replicas_here

    loop = Halved(two_devices(), loss=Pairs)
    loop.replicas_here, loop.metrics = 2, []
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        loop.run()
    assert "also divides it by the number of replicas (`replicas_here`), remove that" in caplog.text


@pytest.mark.slow
def test_a_function_that_cannot_be_tried_is_named(caplog):
    class Reads(Loop):
        def loss_of(self, y, outputs):
            if tf.executing_eagerly():
                raise ValueError("on drawn numbers")
            return super().loss_of(y, outputs)

    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        Reads(two_devices()).run()
    assert "could not be tried (ValueError: on drawn numbers)" in caplog.text


@pytest.mark.slow
def test_a_trial_leaves_no_trace():
    """The generator of dropout, the metrics and the weights: one device's, which runs no trial."""
    assert_alike(Loop(one_device()).run(), Loop(two_devices()).run())


class Alone(Loop):
    """A mean over a replica's rows, divided by the number of replicas: right where all hold the same number of rows."""

    def loss_of(self, y, outputs):
        return tf.reduce_mean(ops.square(y - outputs)) / self.strategy.num_replicas_in_sync


@pytest.mark.slow
def test_what_counts_replicas_alike_is_named_before_an_uneven_batch(caplog):
    loop = Alone(two_devices())
    loop.metrics = []
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        even = loop.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, True))
        for x, y in even:
            loop.strategy.run(loop.step, args=(x, y))
        assert "strategy.run" not in caplog.text
        loop.run()
    (said,) = (each.getMessage() for each in caplog.records if each.name.startswith("tfgpu"))
    assert "`step` of `strategy.run` counts each replica alike" in said and "drop_remainder" in said
    assert functions(loop.strategy)[-1] == verdicts.NOT_AS_ONE


class Running(keras.layers.Layer):
    """Keeps a running mean of what it gets, and a count of it."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
            self.calls.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x - ops.stop_gradient(ops.convert_to_tensor(self.calls)) * 0.01


class Balance(keras.layers.Layer):
    """Its penalty is no mean over rows."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(ops.softmax(x), 0))))
        return x


class Penalized(Divided):
    def loss_of(self, y, outputs):
        return super().loss_of(y, outputs) + tf.nn.scale_regularization_loss(tf.add_n(self.model.losses))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("layer", [Running, Balance, keras.layers.BatchNormalization])
def test_layers_in_a_loop_whose_last_batch_leaves_a_replica_without_rows(layer, replicas, caplog):
    kind = Penalized if layer is Balance else Divided
    strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert_alike(kind(one_device(), layer=layer).run(), kind(strategy, layer=layer).run())
    assert "`step` of `strategy.run`" not in caplog.text or layer is Balance


class Mixed(Loop):
    """Mixes rows with others, whose numbers it draws."""

    def loss_of(self, y, outputs):
        order = keras.random.shuffle(tf.range(tf.shape(y)[0]), seed=1)
        return super().loss_of(0.5 * y + 0.5 * tf.gather(y, order), outputs)


@pytest.mark.slow
def test_shuffled_numbers_of_rows_are_named():
    loop = Mixed(two_devices(unproven="refuse"))
    with pytest.raises(InputError, match="it shuffles the numbers of a batch's rows"):
        loop.run(eagerly=True)


@pytest.mark.parametrize("kind", [tuple, pytest.param(dict, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [9, pytest.param(11, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_sparse_rows_fewer_than_replicas(rows, kind, caplog):
    """TensorFlow cannot give a replica none of the rows of a sparse tensor."""

    def trained(replicas):
        devices = [f"CPU:{at}" for at in range(replicas)]
        strategy = tfgpu.strategy("mirrored", devices=devices) if replicas > 1 else one_device()
        with strategy.scope():
            kernel, optimizer = tf.Variable(tf.fill((5, 3), 0.1)), keras.optimizers.SGD(0.1)
            optimizer.build([kernel])
            loss_of, mean = keras.losses.MeanSquaredError(), keras.metrics.Mean()

        def step(batch):
            x, y = (batch["x"], batch["y"]) if kind is dict else batch
            with tf.GradientTape() as tape:
                loss = loss_of(y, tf.sparse.sparse_dense_matmul(x, kernel))
            optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])
            mean.update_state(loss)

        parts = tf.sparse.from_dense(np.where(X[:rows] > 0, X[:rows], 0)), Y[:rows]
        data = tf.data.Dataset.from_tensor_slices(dict(zip("xy", parts, strict=True)) if kind is dict else parts)
        run = tf.function(lambda batch: strategy.run(step, args=(batch,)))
        for batch in strategy.experimental_distribute_dataset(data.batch(4)):
            run(batch)
        return kernel.numpy(), mean.result().numpy()

    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        assert_alike(trained(1), trained(4 if rows == 11 else 2))
    assert "could not be tried" not in caplog.text


class Centralized(keras.optimizers.SGD):
    """Takes the mean from each gradient of a kernel, as gradient centralization does."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(gradient - tf.reduce_mean(gradient, 0), variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(pairs)


class CentralizedInApply(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([gradient - tf.reduce_mean(gradient, 0) for gradient in grads], trainable_variables)


@pytest.mark.parametrize("kind", [Centralized, pytest.param(CentralizedInApply, marks=pytest.mark.slow)])
def test_an_optimizer_that_changes_gradients_is_not_warned_about(kind, caplog):
    def trained(strategy):
        loop = Loop(strategy)
        with strategy.scope():
            loop.optimizer, loop.metrics = kind(0.1), []
            loop.optimizer.build(loop.model.trainable_variables)
        return loop.run()

    with caplog.at_level(logging.WARNING):
        assert_alike(trained(one_device()), trained(two_devices()))
    assert not [record for record in caplog.records if record.name.startswith("tfgpu") or "AutoGraph" in record.msg]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [keras.layers.GRU, keras.layers.LSTM], ids=["gru", "lstm"])
def test_a_replica_without_rows_runs_recurrent_layers(kind):
    """The last batch has fewer rows than there are replicas; TensorFlow builds no such graph for a static 0 rows."""
    words = np.random.default_rng(2).integers(0, 9, (9, 7))

    def weights_on(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Bidirectional(kind(3))]
            model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers, keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss((model(x, training=True)[:, 0] - y) ** 2, global_batch_size=8)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))

        @tf.function
        def train(batch):
            strategy.run(step, args=batch)

        rows = tf.data.Dataset.from_tensor_slices((words, words[:, 0].astype("float32"))).batch(8)
        for batch in strategy.experimental_distribute_dataset(rows):
            train(batch)
        return model.get_weights()

    expected = weights_on(tf.distribute.get_strategy())
    for found, one in zip(weights_on(tfgpu.strategy(devices=4)), expected, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-6)


def test_an_eager_replica_without_rows_has_gradients_of_all_weights():
    """Keras adds a bias to a stand-in row there, below which the kernel of the layer before it must still be found."""

    def weights_on(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Conv1D(2, 2), keras.layers.MaxPooling1D(), keras.layers.Flatten()]
            model = keras.Sequential([keras.Input((5, 1)), *layers, keras.layers.Dense(3)])
            optimizer = keras.optimizers.SGD(0.1)

        @tfgpu.by_rows
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x) - y) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))

        rows = tf.data.Dataset.from_tensor_slices((X[..., None], Y)).batch(10)
        for batch in strategy.experimental_distribute_dataset(rows):
            strategy.run(step, args=batch)
        return model.get_weights()

    assert_alike(weights_on(one_device()), weights_on(two_devices()))


@pytest.mark.parametrize(
    ("loss", "shape", "eagerly"),
    [
        pytest.param(keras.losses.CTC, (5, 3), False, id="ctc", marks=pytest.mark.slow),
        pytest.param(keras.losses.CTC, (5, 3), True, id="ctc-eager", marks=pytest.mark.slow),
        pytest.param(keras.losses.CategoricalHinge, (2,), True, id="max-eager"),
    ],
)
def test_a_loss_on_a_replica_without_rows(loss, shape, eagerly):
    """TensorFlow fails in CTC of an empty batch, and Keras in `max` if it runs eagerly."""
    outputs = np.random.default_rng(3).normal(size=(3, *shape)).astype("float32")
    labels = np.array([[1, 2], [2, 1], [1, 1]])

    def gradients_on(strategy):
        with strategy.scope():
            factor, optimizer, loss_of = tf.Variable(tf.ones(shape)), keras.optimizers.SGD(0.1), loss()
            optimizer.build([factor])

        @tfgpu.by_rows
        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss_of(y, x * factor)
            optimizer.apply_gradients([(tape.gradient(value, factor), factor)])
            return value

        def run(batch):
            return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

        run = run if eagerly else tf.function(run)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((outputs, labels)).batch(2))
        return [*(run(batch) for batch in data), factor.numpy()]

    assert_alike(gradients_on(one_device()), gradients_on(two_devices()))


@pytest.mark.slow
def test_a_model_that_its_first_batch_builds_is_not_warned_about(caplog):
    strategy = two_devices()
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD(0.1)
        loss_of = keras.losses.MeanSquaredError()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(lambda batch: strategy.run(step, args=batch))
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)):
            run(batch)
    assert caplog.text == ""
