"""Residual networks: published sizes, strides, and initial blocks."""

import math

import keras
import numpy as np
import pytest

from tfgpu import models
from tfgpu.errors import InputError


def sketch(*args, **options):
    """A model with uninitialized variables: enough for shapes, at a hundredth of the cost."""
    with keras.StatelessScope(initialize_variables=False):
        return models.resnet(*args, **options)


def trainable(model):
    return sum(math.prod(v.shape) for v in model.trainable_variables)


@pytest.mark.sample("18", "50")
@pytest.mark.parametrize(
    ("depth", "published"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_published_parameter_counts(depth, published):
    assert trainable(sketch((224, 224, 3), 1000, depth=depth)) == published


def test_resnet20_parameters_by_hand():
    # convolutions without bias; a normalization has 2 trainable numbers a channel
    stem = 27 * 16 + 32
    stage1 = 6 * (9 * 16 * 16 + 32)
    stage2 = 9 * 16 * 32 + 5 * 9 * 32 * 32 + 6 * 64
    stage3 = 9 * 32 * 64 + 5 * 9 * 64 * 64 + 6 * 128
    head = 64 * 10 + 10
    paper = stem + stage1 + stage2 + stage3 + head
    assert paper == 269_722  # the paper's 0.27M, whose shortcuts have no weights
    shortcuts = 16 * 32 + 64 + 32 * 64 + 128
    assert trainable(sketch((32, 32, 3), 10, depth=20)) == paper + shortcuts == 272_474


@pytest.mark.sample(4)
@pytest.mark.parametrize("depth", [8, 14, 20, 26, 32, 38, 44, 56, 110, 18, 34, 50, 101, 152])
def test_depth_counts_the_layers_with_weights(depth):
    model = sketch((32, 32, 3), 10, depth=depth)
    kernels = [w for w in model.layers if isinstance(w, keras.layers.Conv2D | keras.layers.Dense)]
    assert len([layer for layer in kernels if "shortcut" not in layer.name]) == depth


def test_version_1_5_has_its_stride_on_the_3x3():
    model = sketch((224, 224, 3), 10, depth=50)
    strides = {name: model.get_layer(f"stage2_block1_{name}").strides for name in ("conv1", "conv2", "conv3")}
    assert strides == {"conv1": (1, 1), "conv2": (2, 2), "conv3": (1, 1)}
    assert model.get_layer("stage2_block1_conv2").kernel_size == (3, 3)


@pytest.mark.parametrize(
    ("shape", "stem", "side"),
    [
        ((32, 32, 3), "auto", 4),  # 32 / 8
        ((64, 64, 3), "auto", 8),
        ((96, 96, 3), "auto", 3),  # 96 / 32
        ((224, 224, 3), "auto", 7),
        ((32, 32, 3), "imagenet", 1),
        ((8, 8, 1), "auto", 1),
        ((96, 96, 3), "small", 12),
    ],
)
def test_the_stem_suits_the_image(shape, stem, side):
    model = sketch(shape, 10, depth=18, stem=stem)
    assert model.get_layer("average").input.shape == (None, side, side, 512)


@pytest.mark.sample("18")
@pytest.mark.parametrize("depth", [8, 18, 50])
def test_zero_init_residual_starts_every_block_as_its_shortcut(depth):
    keras.utils.set_random_seed(0)
    model = models.resnet((8, 8, 3), 4, depth=depth, zero_init_residual=True)
    shortcut = "stage1_block1_shortcut_norm" if depth == 50 else "stem_activation"
    names = (shortcut, "stage1_block1_add")
    both = keras.Model(model.input, [model.get_layer(name).output for name in names])
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    np.testing.assert_array_equal(*both(x))


def test_zero_init_residual_needs_a_normalization():
    with pytest.raises(InputError, match="zero_init_residual=True, normalization='none'"):
        models.resnet(zero_init_residual=True, normalization="none")


@pytest.mark.parametrize("depth", [19, 0, -1, 18.0, "18", True, [18]])
def test_an_impossible_depth_lists_the_possible(depth):
    with pytest.raises(InputError, match="Choices: 8, 14, 18, 20, 26, 32, 34, 38, 44, 50, 56, 101, 110, 152"):
        models.resnet(depth=depth)


def test_an_unknown_stem():
    with pytest.raises(InputError, match="Unknown stem 'imagnet'. Did you mean 'imagenet'"):
        models.resnet(stem="imagnet")
