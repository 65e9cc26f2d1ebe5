"""BatchNormalization's moments: over the whole batch as on one device, or, on request, over each replica's rows."""

import inspect

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
import tracer

import tfgpu
from tfgpu.errors import InputError

ROWS = np.random.default_rng(0).normal(3, 2, (26, 6, 4)).astype("float32")
TARGETS = ROWS.sum((1, 2))[:, None] / 10


class Halves(keras.layers.BatchNormalization):
    """Normalizes each half of the batch by itself."""

    def call(self, inputs, training=None):
        return keras.ops.concatenate([super(Halves, self).call(half, training) for half in keras.ops.split(inputs, 2)])


def trained(strategy, norm, mask=None, rows=26, epochs=3):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((6, 4)), *([keras.layers.Masking(mask)] if mask is not None else []), norm()]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(ROWS, TARGETS, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)
    return model


def copies(variable):
    found = [copy.numpy() for copy in variable.value.values]
    assert len(found) > 1
    return found


@pytest.mark.sample("True--1-4")
@pytest.mark.parametrize("rows", [26, 7, 4])  # even; uneven; the last batch has fewer rows than replicas
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("is_masked", [False, True])
def test_moments_are_those_of_one_device(rows, axis, is_masked):
    found = [
        trained(strategy, lambda: keras.layers.BatchNormalization(axis=axis), 0.0 if is_masked else None, rows)
        for strategy in (tfgpu.strategy("one_device"), tfgpu.strategy("mirrored", devices=3))
    ]
    for one, ours in zip(*(model.get_weights() for model in found), strict=True):
        np.testing.assert_allclose(ours, one, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 7])
def test_a_gradient_of_a_gradient_is_one_device_s(rows):
    class Smooth(keras.Model):
        """Learns small slopes: its loss is a gradient through the moments."""

        def train_step(self, data):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(data)
                    outputs = self(data, training=True) ** 2
                slopes = inner.gradient(outputs, data)
                loss = tf.reduce_mean(tf.reduce_sum(slopes**2, [1, 2]))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"slopes": loss}

    def weights(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            norm, inputs = keras.layers.BatchNormalization(), keras.Input((6, 4))
            model = Smooth(inputs, keras.layers.Dense(2)(norm(keras.layers.Dense(3, activation="tanh")(inputs))))
            model.compile(keras.optimizers.SGD(0.0005))
        model.fit(ROWS[:rows] / 4, batch_size=rows, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    one, ours = weights(tfgpu.strategy("one_device")), weights(tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]))
    for here, there in zip(ours, one, strict=True):
        np.testing.assert_allclose(here, there, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_moments_cost_two_collectives_a_layer():
    facts = _facts(tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"]))
    assert [each.bytes for each in facts.collectives["GPU:0"]][:2] == [2 * 2 * 4 * 4] * 2  # replicas, moments, channels
    assert len(facts.collectives["GPU:0"]) == 3  # and the gradients


def test_moments_make_no_tensor_of_weights_and_no_matrix_product():
    tfgpu.repair_keras()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        norm = keras.layers.BatchNormalization()
        norm.build((None, 6, 4))

    @tf.function
    def normalize(x):
        return strategy.run(norm, args=(x,), kwargs={"training": True})

    operations = normalize.get_concrete_function(tf.zeros((13, 6, 4))).graph.get_operations()
    assert not [op.name for op in operations if op.type in ("MatMul", "BatchMatMulV2", "Einsum")]
    weights = "OnesLike", "BroadcastTo", "Fill", "SelectV2", "Const"
    assert not [op.name for op in operations if op.type in weights and op.outputs[0].shape == (13, 6, 4)]


@pytest.mark.slow
def test_moments_of_replicas_cost_no_collective(caplog):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"], batch_norm="replica")
    assert "no longer that of one device" in caplog.text
    facts = _facts(strategy)
    assert len(facts.collectives["GPU:0"]) == 1  # the gradients
    assert facts.per_call.collectives["GPU:0"][0].bytes == 4 * (2 + 8)  # the loss, and the moving moments


def _facts(strategy):
    with gpu_way.gpu_way(), tracer.recording() as calls:
        trained(
            strategy, lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()]), epochs=1
        )
    return calls.step(rows=13)


@pytest.mark.slow
def test_moments_of_replicas_are_those_of_their_rows():
    one = trained(tfgpu.strategy("one_device"), Halves, epochs=2)
    ours = trained(
        tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), keras.layers.BatchNormalization, epochs=2
    )
    for expected, found in zip(one.trainable_variables, ours.trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_moving_moments_of_replicas_are_averaged():
    model = trained(
        tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), keras.layers.BatchNormalization, epochs=1
    )
    halves = np.split(ROWS, 2)
    for variable, start, of_half in (
        (model.layers[0].moving_mean, 0, [half.mean((0, 1)) for half in halves]),
        (model.layers[0].moving_variance, 1, [half.var((0, 1)) for half in halves]),
    ):
        for copy in copies(variable):
            np.testing.assert_allclose(copy, 0.99 * start + 0.01 * np.mean(of_half, 0), rtol=1e-5)


@pytest.mark.slow
def test_a_replica_without_rows_leaves_its_moving_moments(caplog):
    model = trained(
        tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), keras.layers.BatchNormalization, rows=25, epochs=1
    )
    assert np.isfinite(model.evaluate(ROWS, TARGETS, verbose=0))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


RENORM = "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters


@pytest.mark.slow
@pytest.mark.parametrize("renorm", [False, pytest.param(True, marks=pytest.mark.skipif(not RENORM, reason="Keras"))])
def test_replicas_without_rows_keep_their_moving_moments(renorm):
    """All but one of three replicas have no rows: the average is a third of the way that one device goes."""
    settings = {"renorm": True, "renorm_momentum": 0.5} if renorm else {}
    norm = lambda: keras.layers.BatchNormalization(momentum=0.5, **settings)  # noqa: E731
    strategies = tfgpu.strategy("one_device"), tfgpu.strategy("mirrored", devices=3, batch_norm="replica")
    found = []
    for strategy in strategies:
        with strategy.scope():
            model = keras.Sequential([keras.Input((6, 4)), norm(), keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            start = model.layers[0].get_weights()
        model.fit(ROWS[:1], TARGETS[:1], batch_size=1, verbose=0)
        found.append(model.layers[0].non_trainable_variables)
    for before, one, ours in zip(start[2:], *found, strict=True):
        for copy in copies(ours):
            np.testing.assert_allclose(copy, (2 * before + one.numpy()) / 3, rtol=1e-5)


@pytest.mark.slow
def test_frozen_layers_keep_their_moving_moments_to_the_bit():
    def frozen():
        norm = keras.layers.BatchNormalization(moving_variance_initializer=keras.initializers.RandomUniform(1, 2))
        norm.trainable = False
        return norm

    strategy = tfgpu.strategy("mirrored", devices=3, batch_norm="replica")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 4)), frozen(), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    before = model.layers[0].get_weights()
    model.fit(ROWS, TARGETS, batch_size=9, verbose=0)
    for was, variable in zip(before, model.layers[0].weights, strict=True):
        assert all((copy == was).all() for copy in copies(variable))


class WithUntracked(keras.Model):
    """Trains an encoder, which it does not track, and lets a second one follow it."""

    def __init__(self):
        super().__init__()
        made = [keras.Sequential([keras.Input((6, 4)), keras.layers.BatchNormalization(momentum=0.5)]) for _ in "ab"]
        object.__setattr__(self, "encoder", made[0])
        self.target, self.head = made[1], keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.head(keras.layers.Flatten()(self.encoder(x, training=training)))

    def train_step(self, data):
        logs = super().train_step(data)
        for ours, theirs in zip(self.target.weights, self.encoder.weights, strict=True):
            ours.assign(0.5 * ours + 0.5 * theirs)
        return logs


@pytest.mark.slow
def test_all_layers_that_ran_and_all_that_follows_them_are_averaged():
    strategy = tfgpu.strategy("mirrored", devices=2, batch_norm="replica")
    with strategy.scope():
        model = WithUntracked()
        model.compile("sgd", "mse")
        model(ROWS)
    model.fit(ROWS, TARGETS, batch_size=13, verbose=0)
    for variable in (*model.encoder.weights, *model.target.weights):
        first, second = copies(variable)
        np.testing.assert_allclose(first, second, rtol=1e-6)


def test_moments_of_64_bits_are_averaged_in_64_bits():
    norm = lambda: keras.layers.BatchNormalization(dtype="float64", momentum=0.5)  # noqa: E731
    model = trained(tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), norm, epochs=1)
    expected = 0.5 * ROWS.astype("float64").mean((0, 1))
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), expected, rtol=1e-13)


def test_synchronized_layers_still_see_all_rows():
    norm = lambda: keras.layers.BatchNormalization(synchronized=True)  # noqa: E731
    one = trained(tfgpu.strategy("one_device"), norm)
    ours = trained(tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), norm)
    for expected, found in zip(one.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_an_unknown_scope_is_refused():
    for scope in ("local", None):
        with pytest.raises(InputError, match="batch_norm"):
            tfgpu.strategy("mirrored", devices=2, batch_norm=scope)
    with pytest.raises(InputError, match="does not apply"):
        tfgpu.strategy("one_device", batch_norm="replica")
