"""Quantized layers are split over devices, and give what they give on one: a layer in int8 to the bit."""

import math

import block_models as models
import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.compat.layers import raw_kernel
from tfgpu.parallel import Mesh, apply, tensor

INT4 = pytest.param(
    "int4",
    marks=pytest.mark.skipif(tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14), reason="stored otherwise"),
)
IDS = np.random.default_rng(0).integers(0, models.WORDS, (6, models.LENGTH))


def mesh(**sizes):
    return Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])


def made(mode, *, lora=False):
    model = models.model()
    model.quantize(mode)
    if lora:
        for layer in model.get_layer("block")._flatten_layers():
            if isinstance(layer, keras.layers.Dense):
                layer.enable_lora(2)
                layer.lora_kernel_b.assign(np.random.default_rng(1).normal(size=layer.lora_kernel_b.shape) * 0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", ["int8", INT4])
def test_the_training_is_one_devices(mode, lora, sizes):
    one, model = made(mode, lora=lora), apply(made(mode, lora=lora), mesh(**sizes))
    np.testing.assert_allclose(model.predict(IDS, verbose=0), one.predict(IDS, verbose=0), atol=1e-6)
    gate, whole = model.get_layer("block").gate, one.get_layer("block").gate
    held = [v for v in gate.variables if v.dtype == "int8" and "zero" not in v.path]
    assert {math.prod(each.shape) for each in held} == {math.prod(raw_kernel(whole).shape) // 2}
    models.assert_equal(one, models.fit(one), model, models.fit(model))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", INT4])
def test_files_hold_what_one_device_saves(mode, tmp_path):
    one, model = made(mode), tensor(made(mode), devices=2)
    models.fit(model, epochs=1)
    model.save_weights(tmp_path / "split.weights.h5")
    one.load_weights(tmp_path / "split.weights.h5")
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    again = tensor(made(mode), devices=2)
    one.save_weights(tmp_path / "whole.weights.h5")
    again.load_weights(tmp_path / "whole.weights.h5")
    for mine, other in zip(again.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def pair(mode, *, activation="relu"):
    """Two layers with several axes, as attention has them."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3, 12))
    wide = keras.layers.EinsumDense("bqm,muh->bquh", (None, 4, 6), bias_axes="uh", activation=activation)(inputs)
    model = keras.Model(inputs, keras.layers.EinsumDense("bquh,uhm->bqm", (None, 12), bias_axes="m")(wide))
    model.quantize(mode)
    return model


@pytest.mark.parametrize("mode", ["int8", INT4])
def test_einsum_layers(mode):
    one, model = pair(mode), tensor(pair(mode), devices=2)
    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype("float32") * [[[1.0]], [[30.0]]]
    expected, found = one.predict(x, verbose=0), model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if mode == "int8" else 1e-5)
    assert model.layers[1].weights[0].shape != one.layers[1].weights[0].shape
    for each in (one, model):
        with each.distribute_strategy.scope():
            each.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        each.fit(x, x, epochs=2, verbose=0)
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def attention(mode):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3, 12))
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(4, 6)(inputs, inputs))
    model.quantize(mode)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", INT4])
def test_attention_of_a_functional_model(mode):
    one, model = attention(mode), tensor(attention(mode), devices=2)
    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype("float32")
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), rtol=0, atol=1e-6)


def odd():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(6)(inputs)))
    model.quantize("int4")
    return model


def in_float8():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(4)(inputs)))
    model.quantize("float8")
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(odd, "6 columns are stored in pairs, which do not divide into 2 shards", marks=INT4.marks),
        (in_float8, "quantized to float8.* Spread a model quantized in this way by"),
    ],
)
def test_what_cannot_be_split_says_why(model, words):
    with pytest.raises(tfgpu.InputError, match=words):
        tensor(model(), devices=2)
