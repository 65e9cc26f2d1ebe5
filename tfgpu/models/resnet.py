"""Residual networks: the ImageNet family (18 to 152 layers, version 1.5) and CIFAR's (6n + 2 layers)."""

import functools
from collections.abc import Sequence
from types import MappingProxyType

import keras

from tfgpu.errors import InputError, is_whole, whole_number
from tfgpu.models import parts
from tfgpu.models.recompute import block

# depth -> blocks of each stage; the stages have 64, 128, 256 and 512 channels.
BASIC = MappingProxyType({18: (2, 2, 2, 2), 34: (3, 4, 6, 3)})
BOTTLENECK = MappingProxyType({50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)})
# depth -> blocks of each of three stages, of 16, 32 and 64 channels.
THIN = MappingProxyType({6 * n + 2: (n, n, n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 18)})
STEMS = ("auto", "small", "imagenet")
LARGEST_SMALL_SIDE = 64
EXPANSION = 4


def resnet(
    input_shape: Sequence[int | None] = (32, 32, 3),
    classes: int = 10,
    *,
    depth: int = 20,
    stem: str = "auto",
    zero_init_residual: bool = False,
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "batch",
    dropout: float = 0.0,
    recompute: bool = False,
) -> keras.Model:
    """Builds the ResNet with the given depth.

    Depths 18 and 34 (two 3x3 convolutions per block) and 50, 101 and 152 (1x1, 3x3, 1x1; version 1.5: the stride is on
    the 3x3) have 64 to 512 (times 4) channels. Depths 8, 14, 20, 26, 32, 38, 44, 56 and 110 are the thin CIFAR family
    with 16 to 64 channels. In both, shortcuts that change the shape are 1x1 convolutions (the paper's type B).

    Args:
        input_shape: (height, width, channels) of one image, in pixels.
        classes: number of outputs.
        depth: layers with weights, as the paper counts them.
        stem: "imagenet" is a 7x7 convolution and pooling, which together divide the sides by 4; "small" is one 3x3
            convolution; "auto" is "small" up to 64 pixels.
        zero_init_residual: initialize the scale of each block's last normalization with zeros, so that each block
            starts as its shortcut (Goyal et al., 2017); helps with large batches.
        activation: a Keras activation's name.
        initializer: a Keras initializer's name, for the convolutions.
        normalization: "batch", "sync_batch" (statistics over all replicas), "layer", "group" or "none".
        dropout: rate before the last layer.
        recompute: recompute each block's activations in the backward pass instead of storing them: less memory and
            more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model whose outputs are logits in float32 (use a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument, such as a depth that no ResNet has.

    Example:
        >>> resnet((32, 32, 3), 10, depth=8).output_shape
        (None, 10)

    Source: He et al., 2015, "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385; version
        1.5: https://catalog.ngc.nvidia.com/orgs/nvidia/resources/resnet_50_v1_5_for_tensorflow.
    """
    shape = parts.check_shape("resnet", input_shape, ("height", "width", "channels"))
    whole_number("classes", classes)
    blocks = _blocks(depth)
    parts.check_choice("stem", stem, STEMS)
    parts.check_flag("zero_init_residual", zero_init_residual)
    parts.check_flag("recompute", recompute)
    style = parts.check_style(activation, initializer, normalization)
    if zero_init_residual and normalization == "none":
        raise InputError(
            "`zero_init_residual` needs a normalization. Received: zero_init_residual=True, normalization='none'. "
            "Choose a normalization, or set it to False."
        )
    dropout = parts.check_rate("dropout", dropout)

    residual = functools.partial(_bottleneck if depth in BOTTLENECK else _basic, **style)
    width = 16 if depth in THIN else 64

    inputs = keras.Input(shape, name="inputs")
    large = stem == "imagenet" or (stem == "auto" and min(shape[:2]) > LARGEST_SMALL_SIDE)
    x = parts.convolve(inputs, width, 7 if large else 3, 2 if large else 1, **style, name="stem")
    if large:
        x = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, count in enumerate(blocks, start=1):
        for i in range(1, count + 1):
            name, stride = f"stage{stage}_block{i}", 2 if stage > 1 and i == 1 else 1
            own = {"channels": width * 2 ** (stage - 1), "stride": stride, "zero_gamma": zero_init_residual}
            add = functools.partial(residual, **own, name=name)
            x = block(x, add, recompute=recompute, name=name)
    x = keras.layers.GlobalAveragePooling2D(dtype="float32", name="average")(x)
    x = parts.drop(x, dropout, name="dropout")
    return keras.Model(inputs, parts.logits(x, classes), name=f"resnet{depth}")


def _blocks(depth: object) -> tuple[int, ...]:
    known = {**THIN, **BASIC, **BOTTLENECK}
    if not is_whole(depth) or depth not in known:
        depths = ", ".join(str(d) for d in sorted(known))
        raise InputError(f"There is no ResNet of this depth. Received: depth={depth!r}. Choices: {depths}.")
    return known[depth]


def _basic(x, channels, stride, *, zero_gamma, name, **style):
    y = parts.convolve(x, channels, 3, stride, **style, name=f"{name}_conv1")
    y = parts.convolve(y, channels, 3, 1, **style, name=f"{name}_conv2", zero_gamma=zero_gamma, activate=False)
    return _join(x, y, stride, **style, name=name)


def _bottleneck(x, channels, stride, *, zero_gamma, name, **style):
    y = parts.convolve(x, channels, 1, 1, **style, name=f"{name}_conv1")
    y = parts.convolve(y, channels, 3, stride, **style, name=f"{name}_conv2")
    y = parts.convolve(
        y, channels * EXPANSION, 1, 1, **style, name=f"{name}_conv3", zero_gamma=zero_gamma, activate=False
    )
    return _join(x, y, stride, **style, name=name)


def _join(x, y, stride, *, name, **style):
    """Adds the branch `y` to the shortcut from `x`, which is projected if the shape changes."""
    if stride != 1 or x.shape[-1] != y.shape[-1]:
        x = parts.convolve(x, y.shape[-1], 1, stride, **style, name=f"{name}_shortcut", activate=False)
    x = keras.layers.Add(name=f"{name}_add")([x, y])
    return keras.layers.Activation(style["activation"], name=f"{name}_out")(x)
