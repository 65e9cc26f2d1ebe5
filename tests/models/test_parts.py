"""The builders' shared code."""

import keras
import numpy as np
import pytest

from tfgpu import models
from tfgpu.errors import InputError
from tfgpu.models import parts

IMAGES = ("cnn", "mlp", "resnet")
TEXT = {"transformer": (4,)}


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("normalization", parts.NORMALIZATIONS)
def test_every_normalization_in_every_model(name, normalization):
    options = {"depth": 8} if name == "resnet" else {"filters": [12, 6]} if name == "cnn" else {"widths": [12]}
    with keras.StatelessScope(initialize_variables=False):
        model = models.build(
            name, input_shape=(8, 8, 1), classes=3, options={**options, "normalization": normalization}
        )
    found = {
        "batch": [layer for layer in layers_of(model, keras.layers.BatchNormalization) if not layer.synchronized],
        "sync_batch": [layer for layer in layers_of(model, keras.layers.BatchNormalization) if layer.synchronized],
        "layer": layers_of(model, keras.layers.LayerNormalization),
        "group": layers_of(model, keras.layers.GroupNormalization),
    }
    assert [kind for kind, layers in found.items() if layers] == ([] if normalization == "none" else [normalization])
    kernels = layers_of(model, keras.layers.Conv2D) + layers_of(model, keras.layers.Dense)[:-1]
    assert all(layer.use_bias == (normalization == "none") for layer in kernels)


@pytest.mark.parametrize("name", models.BUILDERS)
def test_activation_initializer_and_dropout_are_used(name):
    shape = TEXT.get(name, (8, 8, 1))
    options = {"activation": "tanh", "initializer": "lecun_uniform", "dropout": 0.5}
    with keras.StatelessScope(initialize_variables=False):
        model = models.build(name, input_shape=shape, classes=3, options=options)
    named = {layer.activation for layer in layers_of(model, keras.layers.Activation)}
    assert named == {keras.activations.tanh}
    assert all(layer.rate == 0.5 for layer in layers_of(model, keras.layers.Dropout))
    assert layers_of(model, keras.layers.Dropout)
    kernels = layers_of(model, keras.layers.Conv2D) + layers_of(model, keras.layers.Dense)[:-1]
    assert all(isinstance(layer.kernel_initializer, keras.initializers.LecunUniform) for layer in kernels)


def test_every_name_is_known_to_keras():
    for name in parts.ACTIVATIONS:
        assert keras.activations.get(name).__name__
    for name in parts.INITIALIZERS:
        assert isinstance(keras.initializers.get(name), keras.initializers.Initializer)


@pytest.mark.parametrize("name", models.BUILDERS)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("activation", "rellu", "Unknown activation 'rellu'. Did you mean 'relu'"),
        ("initializer", "he", "Unknown initializer 'he'"),
        ("initializer", ["he_normal"], "Unknown initializer"),
        ("normalization", "bach", "Unknown normalization 'bach'"),
        ("dropout", 1.0, "`dropout` must be at least 0 and below 1. Received: dropout=1.0"),
        ("dropout", -0.1, "`dropout` must be"),
        ("dropout", "much", "`dropout` must be"),
    ],
)
def test_a_wrong_style_is_refused_by_every_builder(name, option, value, message):
    shape = TEXT.get(name, (8, 8, 1))
    with pytest.raises(InputError, match=message):
        models.build(name, input_shape=shape, classes=3, options={option: value})


@pytest.mark.parametrize("name", models.BUILDERS)
@pytest.mark.parametrize("classes", [0, -1, 2.0, "10", True])
def test_wrong_classes_are_refused_by_every_builder(name, classes):
    with pytest.raises(InputError, match="`classes` must be a whole number of at least 1. Received"):
        models.build(name, input_shape=TEXT.get(name, (8, 8, 1)), classes=classes)


@pytest.mark.parametrize("name", ["cnn", "resnet", "vit"])
@pytest.mark.parametrize("shape", [(8, 8), (64,), (8, 8, 0), (None, None, 3), "8x8", 8, None])
def test_image_models_say_which_shape_they_need(name, shape):
    with pytest.raises(InputError, match=rf"Model '{name}' needs `input_shape` as \(height, width, channels\)"):
        models.BUILDERS[name](shape, 10)


def test_group_normalization_takes_the_most_groups_that_divide():
    found = {}
    for channels in (6, 48, 64):
        inputs = keras.Input((2, 2, channels))
        found[channels] = keras.Model(inputs, parts.normalize(inputs, "group", name="norm")).layers[-1].groups
    assert found == {6: 2, 48: 16, 64: 32}


@pytest.mark.parametrize(("width", "heads", "nearest"), [(65, 4, 64), (10, 4, 8), (1, 4, 4), (23, 6, 24)])
def test_heads_that_do_not_divide_name_the_nearest_width(width, heads, nearest):
    with pytest.raises(InputError, match=f"width={width}, heads={heads}. Use width={nearest}"):
        parts.check_heads(width, heads)


def test_flags_are_not_texts():
    with pytest.raises(InputError, match="`zero_init_residual` must be true or false. Received: .*'false'"):
        models.resnet(zero_init_residual="false")


def test_zero_gamma_silences_a_branch():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, parts.normalize(inputs, "layer", name="norm", zero_gamma=True))
    np.testing.assert_array_equal(model(np.ones((2, 3))), np.zeros((2, 3)))
