"""Vision transformers: an image as a sequence of patches."""

from collections.abc import Sequence
from types import MappingProxyType

import keras

from tfgpu.errors import InputError, whole_number
from tfgpu.models import layers, parts

# Width, depth and heads. "nano" is tfgpu's, for small images on a laptop; the others are the published ones (ViT-Ti,
# -S, -B, -L, -H).
SIZES = MappingProxyType(
    {
        **{"nano": (96, 4, 4), "tiny": (192, 12, 3), "small": (384, 12, 6)},
        **{"base": (768, 12, 12), "large": (1024, 24, 16), "huge": (1280, 32, 16)},
    }
)
POOLS = ("token", "mean")
# 32x32 gets patches of 4 and 224x224 patches of 16, as in the literature.
FEWEST_PATCHES_PER_SIDE = 7


def vit(
    input_shape: Sequence[int | None] = (32, 32, 3),
    classes: int = 10,
    *,
    size: str = "nano",
    patch: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    mlp_width: int | None = None,
    pool: str = "token",
    activation: str = "gelu",
    initializer: str = "glorot_uniform",
    normalization: str = "layer",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    recompute: bool = False,
) -> keras.Model:
    """Builds a vision transformer; ViT-B/16 is `vit((224, 224, 3), 1000, size="base", patch=16)`.

    Args:
        input_shape: (height, width, channels) of one image, in pixels.
        classes: number of outputs.
        size: "nano" (width 96, depth 4, 4 heads), "tiny", "small", "base", "large" or "huge": the defaults of `width`,
            `depth` and `heads`.
        patch: side of a patch, in pixels; divides both of the image's. Default: the largest of 16, 8, 4, 2 and 1 that
            gives 7 patches per side.
        width: units per position.
        depth: number of transformer blocks.
        heads: attention heads; divides `width`.
        mlp_width: hidden units of each block's MLP. Default: 4 times `width`.
        pool: what the logits are computed from: "token" (a learned token before the patches) or "mean" (of all
            patches).
        activation: a Keras activation's name.
        initializer: a Keras initializer's name.
        normalization: "layer" or "none", before each attention and MLP (pre-LN).
        dropout: rate after the positions are added and after each attention and MLP layer.
        attention_dropout: rate of the attention weights.
        recompute: recompute each block's activations in the backward pass instead of storing them: less memory and
            more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model whose outputs are logits in float32 (use a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument, such as a patch that does not divide the image.

    Example:
        >>> vit((32, 32, 3), 10).output_shape
        (None, 10)

    Source: Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929
    """
    shape = parts.check_shape("vit", input_shape, ("height", "width", "channels"))
    whole_number("classes", classes)
    known = SIZES[parts.check_choice("size", size, tuple(SIZES))]
    given = zip(("width", "depth", "heads"), (width, depth, heads), known, strict=True)
    width, depth, heads = (whole_number(name, default if value is None else value) for name, value, default in given)
    patch = _check_patch(patch, shape)
    parts.check_choice("pool", pool, POOLS)
    style = parts.attention_style(
        width, heads, mlp_width, activation, initializer, normalization, dropout, attention_dropout
    )
    parts.check_flag("recompute", recompute)

    inputs = keras.Input(shape, name="inputs")
    x = keras.layers.Conv2D(width, patch, strides=patch, kernel_initializer=initializer, name="patches")(inputs)
    x = keras.layers.Reshape((x.shape[1] * x.shape[2], width), name="sequence")(x)
    if pool == "token":
        x = layers.ClassToken(name="class_token")(x)
    x = parts.attention_blocks(x, depth=depth, causal=False, recompute=recompute, **style)
    x = x[:, 0] if pool == "token" else keras.layers.GlobalAveragePooling1D(dtype="float32", name="average")(x)
    return keras.Model(inputs, parts.logits(x, classes), name="vit")


def _check_patch(patch: object, shape: tuple[int, ...]) -> int:
    height, width, _ = shape
    if patch is None:
        fits = (p for p in (16, 8, 4, 2) if _divides(p, shape) and min(height, width) // p >= FEWEST_PATCHES_PER_SIDE)
        return next(fits, 1)
    patch = whole_number("patch", patch)
    if not _divides(patch, shape):
        possible = ", ".join(str(p) for p in range(1, min(height, width) + 1) if _divides(p, shape))
        raise InputError(
            f"`patch` must divide the image's sides. Received: patch={patch}, input_shape={shape}. Choices: {possible}."
        )
    return patch


def _divides(patch: int, shape: tuple[int, ...]) -> bool:
    return shape[0] % patch == 0 and shape[1] % patch == 0
