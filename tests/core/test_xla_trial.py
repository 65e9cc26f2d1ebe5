"""`jit_compile="auto"`: which way a trial chooses, and that training continues unchanged meanwhile."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfgpu
from tfgpu.core import step_blocks, xla_trial

tfgpu.repair_keras()


@given(with_xla=st.floats(1e-5, 10), without=st.floats(1e-5, 10), length=st.integers(1, 1000))
def test_the_faster_way_stays(with_xla, without, length):
    trial, first = xla_trial.Trial(), True
    for _ in range(100):
        if trial.is_over:
            break
        seconds = length * (with_xla if trial.jit else without)
        if trial.jit and first:  # it compiles
            seconds, first = seconds + 100, False
        trial.note(trial.jit, length, seconds)
    assert trial.is_over
    assert trial.jit == (with_xla < xla_trial.GAIN * without)


def test_one_slow_block_changes_nothing():
    trial = xla_trial.Trial()
    times = {True: iter([9.0, 0.2, 9.0, 0.2, 0.2, 0.2]), False: iter([1.0] * 20)}
    while not trial.is_over:
        trial.note(trial.jit, 1, next(times[trial.jit]))
    assert trial.jit


def steps_of(strategy, layers, **options):
    """The weights after 30 batches, each a block of its own, and what ran the steps."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    with step_blocks.fixed_steps_per_call(1):
        model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).repeat(10), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 30
    return model.get_weights(), model.train_function


def dense():
    return [keras.layers.Dense(3)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_both_ways_train(devices):
    def strategy():
        return tf.distribute.OneDeviceStrategy("CPU:0") if devices == 1 else tfgpu.strategies.mirrored(devices)

    expected, _ = steps_of(strategy(), dense, jit_compile=False)
    weights, steps = steps_of(strategy(), dense, jit_compile="auto")
    assert steps.trial.is_over
    assert len(steps.trial._seconds[True]) > xla_trial.ROUNDS
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, value, rtol=0, atol=1e-5)


def as_text():
    return [keras.layers.Lambda(lambda x: x + tf.strings.to_number(tf.strings.as_string(tf.reduce_sum(0 * x))))]


@pytest.mark.parametrize(
    ("layers", "why"),
    [(lambda: [keras.layers.Dropout(0.5)], "draws random numbers"), (as_text, "cannot compile the step")],
)
def test_steps_that_xla_changes_or_cannot_compile_run_without_it(layers, why, caplog):
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    expected, _ = steps_of(one, layers, jit_compile=False)
    with caplog.at_level("INFO", logger="tfgpu"):
        weights, steps = steps_of(one, layers, jit_compile="auto")
    assert why in caplog.text
    assert steps.trial.is_over and not steps.trial._seconds[True]
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_keras_own_rule_stays_the_default():
    _, steps = steps_of(tf.distribute.OneDeviceStrategy("CPU:0"), dense)
    assert steps.trial is None


def test_an_unknown_value_is_an_error():
    with pytest.raises(tfgpu.InputError, match="`jit_compile` must be True, False or \"auto\". Received: 'always'"):
        keras.Sequential([keras.layers.Dense(1)]).compile(jit_compile="always")
