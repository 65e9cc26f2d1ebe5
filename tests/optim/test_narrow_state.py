"""Slots in 8 and 16 bits: what they round, what they take, and trainings beside float32's and one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.errors import InputError
from tfgpu.optim import narrow_state
from tfgpu.parallel import memory_by_device, shard
from tfgpu.training.optimizers import with_state_dtype

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(64, 64)).astype("float32")
Y = np.tanh(X @ DRAW.normal(size=(64, 8)).astype("float32") / 8)
CODES = {"int8": "uint8", "bfloat16": "bfloat16"}


def made(dtype, replicas=1, stage=0, kind=keras.optimizers.AdamW, **options):
    names = [f"CPU:{at}" for at in range(replicas)]
    with tfgpu.strategy("mirrored" if replicas > 1 else "one_device", devices=names).scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(72, "tanh"), keras.layers.Dense(72, "tanh"), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((64,)), *layers])
    if stage:
        model = shard(model, stage)
    with model.distribute_strategy.scope():
        optimizer = kind(0.01, **options)
        model.compile(with_state_dtype(optimizer, dtype) if dtype else optimizer, "mse")
    return model


def fit(model, *callbacks, epochs=5):
    return model.fit(X, Y, 16, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)).history["loss"]


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_number_is_rounded_to_the_nearest_of_its_block(is_signed):
    value = DRAW.normal(size=(3, 300)) * 10.0 ** DRAW.uniform(-4, 0, size=(3, 300))
    value = (value if is_signed else value**2).astype("float32")
    codes, scales = narrow_state.quantize(tf.constant(value), "uint8", is_signed)
    back = narrow_state.dequantize(codes, scales, is_signed).numpy()
    table = narrow_state.table(is_signed)
    largest = np.repeat(scales.numpy(), 256)[:900].reshape(3, 300)
    nearest = np.abs(table[:, None, None] - value / largest).min(0)
    if is_signed:
        np.testing.assert_allclose(np.abs(back - value) / largest, nearest, atol=1e-6)
    else:
        assert (back[value > 0] > 0).all()  # Adam divides by it
    assert scales.shape == (4,) and (np.abs(back).max() == np.abs(value).max())
    zeros = narrow_state.quantize(tf.zeros(5), "uint8", is_signed)
    assert not narrow_state.dequantize(*zeros, is_signed).numpy().any()
    codes, scales = narrow_state.quantize(tf.constant(value), "bfloat16", is_signed)
    np.testing.assert_allclose(narrow_state.dequantize(codes, scales, is_signed), value, rtol=2**-8)


@pytest.mark.parametrize(("dtype", "each"), [("int8", 1), ("bfloat16", 2)])
def test_slots_take_an_eighth_or_a_quarter(dtype, each, caplog):
    optimizer = with_state_dtype(keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2), dtype)
    large, small = (keras.Variable(np.zeros(shape), dtype="float32", name="kernel") for shape in ((64, 80), (80,)))
    optimizer.build([large, small])
    sizes = {}
    for variable in optimizer.variables:
        sizes[variable.dtype] = sizes.get(variable.dtype, 0) + int(np.prod(variable.shape))
    in_full = 2 * 20 + 2 * (5120 + 80) + 2 * 80 + 1  # scales; the average, what accumulates; the bias's slots; the rate
    assert sizes == {CODES[dtype]: 2 * 5120, "float32": in_full, "int64": 1}
    assert f"Adam keeps 2 slots (10240 numbers) in {dtype}" in caplog.text


def test_bad_use_is_an_error():
    with pytest.raises(InputError, match="float8"):
        with_state_dtype(keras.optimizers.Adam(), "float8")
    optimizer = keras.optimizers.Adam()
    with pytest.raises(InputError, match="Give each of those"):
        with_state_dtype(keras.optimizers.LossScaleOptimizer(optimizer))
    with pytest.raises(InputError, match="already keeps its state in int8"):
        with_state_dtype(with_state_dtype(optimizer))
    optimizer.build([keras.Variable([1.0])])
    with pytest.raises(InputError, match="already built"):
        with_state_dtype(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "RMSprop", "Muon", "Adafactor", "Lamb"])
def test_training_is_close_to_that_in_float32(dtype, kind):
    optimizer = getattr(keras.optimizers, kind)
    expected, found = (fit(made(each, kind=optimizer)) for each in (None, dtype))
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=0.1)
    assert (found != expected) == (kind != "Adafactor")  # which reads vectors in place of a kernel's velocity


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "stage"), [(2, 0), (3, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_replicas_learn_what_one_device_learns(replicas, stage, kind):
    """But for numbers that rounding tips over to the next code."""
    kind = getattr(keras.optimizers, kind)
    one, model = made("int8", kind=kind, global_clipnorm=1.0), made("int8", replicas, stage, kind, global_clipnorm=1.0)
    np.testing.assert_allclose(fit(model), fit(one), rtol=1e-3)
    for mine, others in zip(one.get_weights(), model.get_weights(), strict=True):
        assert np.mean(np.abs(mine - others) > 1e-3) < 0.01
    if stage:
        alone = memory_by_device(one)["CPU:0"]["optimizer"]
        each = [sizes["optimizer"] for sizes in memory_by_device(model).values()]
        assert max(each) < 0.75 * alone and sum(each) < 1.5 * alone


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "stage"), [(1, 0), (2, 2), (2, 3)])
@pytest.mark.parametrize("dtype", CODES)
def test_a_run_resumes_bit_for_bit(dtype, replicas, stage, tmp_path):
    whole = made(dtype, replicas, stage)
    fit(whole)
    fit(made(dtype, replicas, stage), Checkpoint(tmp_path / "run"), epochs=2)
    again = made(dtype, replicas, stage)
    fit(again, Checkpoint(tmp_path / "run"))
    for mine, others in zip(whole.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.slow
def test_checkpoints_and_files_fit_any_layout(tmp_path):
    fit(made("int8", 3, 2), Checkpoint(tmp_path / "run"), epochs=2)
    one = made("int8")
    Checkpoint(tmp_path / "run").restore(one)
    fit(one, epochs=1)
    one.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, others in zip(loaded.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), others.numpy(), err_msg=others.path)
    fit(loaded, epochs=1), fit(one, epochs=1)
    for mine, others in zip(loaded.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, others)
