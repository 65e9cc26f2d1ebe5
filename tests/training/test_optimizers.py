"""LARS: steps by hand, replicas against one device, saving, and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.errors import InputError
from tfgpu.training import schedules
from tfgpu.training.optimizers import LARS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 6)).astype("float32")  # the last batch of 8 has 5 rows
Y = RNG.integers(0, 3, size=37)


def apply(optimizer, value, gradients, name="kernel"):
    variable = keras.Variable(np.array(value, "float32"), name=name)
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    return variable.numpy()


def test_two_steps_by_hand():
    # |w| = 5, |g| = 2: the ratio is 0.1 * 5 / (2 + 0.2 * 5) = 1/6; the velocity 0.5 * (g + 0.2 w) / 6.
    one = np.array([[3.0], [4.0]]) - 0.5 / 6 * np.array([[0.6], [2.0 + 0.8]])
    settings = {"learning_rate": 0.5, "momentum": 0.9, "trust": 0.1, "weight_decay": 0.2}
    np.testing.assert_allclose(apply(LARS(**settings), [[3], [4]], [[[0], [2]]]), one, rtol=1e-6)
    weight, slope = np.linalg.norm(one), 3.0
    velocity = 0.9 * (np.array([[3.0], [4.0]]) - one)
    velocity += 0.5 * 0.1 * weight / (slope + 0.2 * weight) * (np.array([[3.0], [0.0]]) + 0.2 * one)
    found = apply(LARS(**settings), [[3], [4]], [[[0], [2]], [[3], [0]]])
    np.testing.assert_allclose(found, one - velocity, rtol=1e-6)


def test_nesterov_steps_further():
    # The ratio is 0.1 * 5 / 2 = 0.25, the step 0.25 * 2 = 0.5; once more with 0.9 of it.
    found = apply(LARS(1.0, momentum=0.9, nesterov=True, trust=0.1), [[3], [4]], [[[0], [2]]])
    np.testing.assert_allclose(found, [[3.0], [4.0 - 1.9 * 0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ["bias", "gamma"])
def test_variables_of_one_axis_get_plain_momentum_without_decay(name):
    found = apply(LARS(0.5, momentum=0.5, weight_decay=0.9), [2.0, 4.0], [[1, 0], [1, 0]], name)
    np.testing.assert_allclose(found, [2.0 - 0.5 - 0.75, 4.0])


def test_variables_can_be_left_out_by_name_and_by_keras_s_own_list():
    plain = [[3.0], [4.0 - 0.5 * 2]]
    left = LARS(0.5, momentum=0.0, weight_decay=0.1, exclude=["embed"])
    np.testing.assert_allclose(apply(left, [[3], [4]], [[[0], [2]]], "embedding"), plain)
    listed = LARS(0.5, momentum=0.0, weight_decay=0.1)
    listed.exclude_from_weight_decay(var_names=["embed"])
    np.testing.assert_allclose(apply(listed, [[3], [4]], [[[0], [2]]], "embedding"), plain)


@pytest.mark.parametrize(("value", "gradient"), [([[0.0]], [[2.0]]), ([[3.0]], [[0.0]])])
def test_a_norm_of_zero_leaves_the_rate_as_it_is(value, gradient):
    found = apply(LARS(0.5, momentum=0.0), value, [gradient])
    np.testing.assert_allclose(found, np.array(value) - 0.5 * np.array(gradient))


def test_rows_that_were_looked_up_twice_count_once_in_the_norm():
    table, optimizer = keras.Variable([[3.0], [4.0]], name="table"), LARS(1.0, momentum=0.0, trust=0.1)
    optimizer.apply([tf.IndexedSlices(tf.constant([[1.0], [1.0]]), tf.constant([1, 1]), tf.constant([2, 1]))], [table])
    np.testing.assert_allclose(table.numpy(), [[3.0], [3.5]], rtol=1e-6)  # |g| is 2: 4 - 0.1 * 5 / 2 * 2


OPTIONS = {
    "clipped": {"global_clipnorm": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2},
    "averaged": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "float16": {},
}


def trained(replicas, options, policy="float32", epochs=4, callbacks=()):
    names = [f"CPU:{at}" for at in range(replicas)]
    strategy = tfgpu.strategy("mirrored" if replicas > 1 else "one_device", devices=names)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(8, use_bias=False, dtype=policy), keras.layers.BatchNormalization(dtype=policy)]
        model = keras.Sequential(
            [keras.Input((6,)), *hidden, keras.layers.ReLU(), keras.layers.Dense(3, dtype="float32")]
        )
        rate = schedules.build("cosine", 2.0, total_steps=5 * epochs, warmup_steps=epochs).learning_rate
        model.compile(
            LARS(rate, trust=0.01, weight_decay=0.01, **options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


SLOW = ("averaged", "float16")  # the equivalence matrix has more


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in OPTIONS])
def test_two_replicas_are_one_device_after_twenty_steps(name):
    policy = "mixed_float16" if name == "float16" else "float32"
    one, two = (trained(replicas, OPTIONS[name], policy).get_weights() for replicas in (1, 2))
    # Half precision rounds a sum of rows as they lie on the replicas.
    most = 2e-3 if name == "float16" else 1e-6
    assert max(np.abs(a - b).max() for a, b in zip(one, two, strict=True)) <= most


def test_a_file_and_a_checkpoint_bring_it_back(tmp_path):
    whole = trained(1, {}, epochs=4, callbacks=[Checkpoint(tmp_path / "whole")])
    whole.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, LARS) and loaded.get_config() == whole.optimizer.get_config()
    for a, b in zip(loaded.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    model = trained(2, {}, epochs=4, callbacks=[Checkpoint(tmp_path / "whole")])  # over: it reads and trains nothing
    for a, b in zip(model.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "`momentum` must be at least 0 and below 1"),
        ({"trust": 0}, "`trust` must be above 0"),
        ({"exclude": "bias"}, r"Write \['bias'\]"),
    ],
)
def test_invalid_input_is_reported(options, message):
    with pytest.raises(InputError, match=message):
        LARS(**options)
