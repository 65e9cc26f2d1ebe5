"""A plain convolutional network with pooling. The default of `tfgpu train`."""

import functools
from collections.abc import Sequence

import keras

from tfgpu.errors import whole_number
from tfgpu.models import parts
from tfgpu.models.recompute import block

HEADS = ("auto", "flatten", "average")
MOST_FLATTENED_SIDE = 8


def cnn(
    input_shape: Sequence[int | None] = (8, 8, 1),
    classes: int = 10,
    *,
    filters: Sequence[int] = (32, 64),
    convolutions: int = 2,
    kernel: int = 3,
    head: str = "auto",
    units: int = 128,
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "batch",
    dropout: float = 0.25,
    recompute: bool = False,
) -> keras.Model:
    """Builds a small convolutional classifier.

    Each stage is `convolutions` times (convolution, normalization, activation), then 2x2 max pooling. The head flattens
    or averages the last feature map, followed by one hidden layer and the logits.

    Args:
        input_shape: (height, width, channels) of one image, in pixels.
        classes: number of outputs.
        filters: channels of each stage.
        convolutions: convolutions per stage.
        kernel: kernel size, in pixels.
        head: "flatten" keeps the positions of features, which small images need; "average" keeps the head small for
            large ones; "auto" flattens feature maps of at most 8x8.
        units: units of the head's hidden layer; 0 for none.
        activation: a Keras activation's name.
        initializer: a Keras initializer's name (He et al., 2015, suits relu).
        normalization: before each activation: "batch", "sync_batch", "layer", "group" or "none".
        dropout: rate after each stage and after the hidden layer.
        recompute: recompute each stage's activations in the backward pass instead of storing them: less memory and
            more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model whose outputs are logits in float32 (use a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument.

    Example:
        >>> cnn((8, 8, 1), 10).output_shape
        (None, 10)
    """
    shape = parts.check_shape("cnn", input_shape, ("height", "width", "channels"))
    filters = parts.check_wholes("filters", filters)
    for name, value in {"classes": classes, "convolutions": convolutions, "kernel": kernel}.items():
        whole_number(name, value)
    whole_number("units", units, minimum=0)
    parts.check_choice("head", head, HEADS)
    style = parts.check_style(activation, initializer, normalization)
    dropout = parts.check_rate("dropout", dropout)
    parts.check_flag("recompute", recompute)

    inputs = x = keras.Input(shape, name="inputs")
    for number, channels in enumerate(filters, start=1):
        name = f"stage{number}"
        add = functools.partial(
            _stage, channels=channels, convolutions=convolutions, kernel=kernel, dropout=dropout, name=name, **style
        )
        x = block(x, add, recompute=recompute, name=name)
    if head == "flatten" or (head == "auto" and max(x.shape[1:3]) <= MOST_FLATTENED_SIDE):
        x = keras.layers.Flatten(name="flatten")(x)
    else:
        x = keras.layers.GlobalAveragePooling2D(dtype="float32", name="average")(x)
    if units:
        has_bias = normalization == "none"
        x = keras.layers.Dense(units, use_bias=has_bias, kernel_initializer=initializer, name="hidden")(x)
        x = parts.normalize(x, normalization, name="hidden_norm")
        x = keras.layers.Activation(activation, name="hidden_activation")(x)
        x = parts.drop(x, dropout, name="hidden_dropout")
    return keras.Model(inputs, parts.logits(x, classes), name="cnn")


def _stage(x, *, channels: int, convolutions: int, kernel: int, dropout: float, name: str, **style: str):
    for i in range(1, convolutions + 1):
        x = parts.convolve(x, channels, kernel, **style, name=f"{name}_conv{i}")
    # "same" keeps a feature map of one pixel, so any depth works for any image.
    x = keras.layers.MaxPooling2D(2, padding="same", name=f"{name}_pool")(x)
    return parts.drop(x, dropout, name=f"{name}_dropout")
