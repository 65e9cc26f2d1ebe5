"""Vision transformers: published sizes, patches, and pooling."""

import math

import keras
import numpy as np
import pytest

from tfgpu import models
from tfgpu.errors import InputError


def sketch(*args, **options):
    with keras.StatelessScope(initialize_variables=False):
        return models.vit(*args, **options)


def trainable(model):
    return sum(math.prod(v.shape) for v in model.trainable_variables)


@pytest.mark.parametrize(
    ("size", "published"),
    [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)],
)
def test_published_parameter_counts(size, published):
    assert trainable(sketch((224, 224, 3), 1000, size=size, patch=16)) == published


def test_small_parameters_by_hand():
    # width 8, 16 patches of 2x2, one block, an MLP of 32
    tokens = 4 * 8 + 8 + 8 + 17 * 8
    attention = 4 * (8 * 8 + 8)
    block = 16 + attention + 16 + 8 * 32 + 32 + 32 * 8 + 8
    assert trainable(sketch((8, 8, 1), 3, width=8, depth=1, heads=2, patch=2)) == tokens + block + 16 + 8 * 3 + 3


@pytest.mark.parametrize(
    ("shape", "patch"),
    [
        ((224, 224, 3), 16),
        ((32, 32, 3), 4),
        ((28, 28, 1), 4),
        ((8, 8, 1), 1),
        ((64, 64, 3), 8),
        ((30, 31, 1), 1),
        ((14, 28, 1), 2),
    ],
)
def test_the_patch_suits_the_image(shape, patch):
    assert sketch(shape, 10, depth=1).get_layer("patches").kernel_size == (patch, patch)


def test_explicit_numbers_come_before_the_size():
    model = sketch((32, 32, 3), 10, size="base", depth=1, width=24, heads=3, mlp_width=40)
    assert model.get_layer("block1_attention").get_config()["key_dim"] == 8
    assert model.get_layer("block1_mlp1").units == 40


def test_mean_pooling_has_no_class_token():
    token, mean = (sketch((8, 8, 1), 3, depth=1, pool=pool) for pool in ("token", "mean"))
    assert trainable(token) - trainable(mean) == 96 + 96  # the token and its position


def test_positions_tell_patches_apart():
    keras.utils.set_random_seed(0)
    model = models.vit((4, 4, 1), 3, width=8, depth=1, heads=2, patch=2)
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 1)).astype("float32")
    assert np.abs(model(x) - model(x[:, ::-1])).max() > 1e-5


def test_a_patch_that_does_not_divide_lists_those_that_do():
    with pytest.raises(InputError, match="patch=5, input_shape=.32, 32, 3.. Choices: 1, 2, 4, 8, 16, 32."):
        models.vit((32, 32, 3), patch=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 100, "heads": 3}, "Use width=99"),
        ({"size": "bas"}, "Unknown size 'bas'. Did you mean 'base'"),
        ({"pool": "max"}, "Unknown pool 'max'"),
        (
            {"normalization": "batch"},
            "Unknown normalization 'batch'. .*Choices: layer, none|Choices: layer, none",
        ),
        ({"depth": 0}, "`depth`"),
        ({"patch": 0}, "`patch`"),
        ({"attention_dropout": 1}, "`attention_dropout`"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(InputError, match=message):
        models.vit(**options)
