"""BatchNormalization's moments: over the whole batch as on one device, or over each replica's rows where asked for."""

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
        copies = [copy.numpy() for copy in tf.distribute.get_strategy().experimental_local_results(variable.value)]
        for copy in copies:
            np.testing.assert_allclose(copy, 0.99 * start + 0.01 * np.mean(of_half, 0), rtol=1e-5)


def test_a_replica_without_rows_leaves_its_moving_moments(caplog):
    model = trained(
        tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), keras.layers.BatchNormalization, rows=25, epochs=1
    )
    assert np.isfinite(model.evaluate(ROWS, TARGETS, verbose=0))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_synchronized_layers_see_all_rows_all_the_same():
    norm = lambda: keras.layers.BatchNormalization(synchronized=True)  # noqa: E731
    one = trained(tfgpu.strategy("one_device"), norm)
    ours = trained(tfgpu.strategy("mirrored", devices=2, batch_norm="replica"), norm)
    for expected, found in zip(one.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_an_unknown_scope_is_refused():
    with pytest.raises(InputError, match="batch_norm"):
        tfgpu.strategy("mirrored", devices=2, batch_norm="local")
    with pytest.raises(InputError, match="does not apply"):
        tfgpu.strategy("one_device", batch_norm="replica")
