"""Shared code of the builders: argument checks, normalization, the attention block, the float32 head."""

import functools
import math
from collections.abc import Sequence

import keras

from tfgpu import errors
from tfgpu.errors import InputError, is_number, is_whole, whole_number
from tfgpu.models import layers
from tfgpu.models.recompute import block

ACTIVATIONS = (
    "celu", "elu", "gelu", "hard_silu", "leaky_relu", "linear", "mish", "relu", "relu6", "selu", "sigmoid",
    "silu", "softplus", "tanh",
)  # fmt: skip
INITIALIZERS = (
    "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform",
    "orthogonal", "random_normal", "random_uniform", "truncated_normal",
)  # fmt: skip
NORMALIZATIONS = ("batch", "sync_batch", "layer", "group", "none")
ATTENTION_NORMALIZATIONS = ("layer", "none")

# The values of the published ResNets; with Keras's default momentum of 0.99 the moving averages need thousands of
# steps to converge.
BATCH_MOMENTUM = 0.9
BATCH_EPSILON = 1e-5
LAYER_EPSILON = 1e-6
MOST_GROUPS = 32


def check_wholes(name: str, values: object, *, fewest: int = 1) -> tuple[int, ...]:
    """Returns `values` as a tuple of whole numbers of at least 1, such as the widths of layers.

    Raises:
        InputError: it is not a list of such numbers, or is shorter than `fewest`.

    Example:
        >>> check_wholes("filters", [32, 64])
        (32, 64)
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < fewest:
        raise InputError(f"`{name}` must be a list of at least {fewest} whole numbers. Received: {name}={values!r}.")
    return tuple(whole_number(f"{name}[{i}]", value) for i, value in enumerate(values))


def check_rate(name: str, value: object) -> float:
    """Returns a dropout rate as a float.

    Raises:
        InputError: it is not at least 0 and below 1.

    Example:
        >>> check_rate("dropout", 0.1)
        0.1
    """
    if not is_number(value) or not 0 <= value < 1:
        raise InputError(f"`{name}` must be at least 0 and below 1. Received: {name}={value!r}.")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """Returns `value` if it is `True` or `False`.

    Raises:
        InputError: it is anything else, such as the string "false", which is truthy.

    Example:
        >>> check_flag("zero_init_residual", False)
        False
    """
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be true or false. Received: {name}={value!r}.")
    return value


def check_choice(kind: str, value: object, choices: Sequence[str]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
        InputError: it is not; names the closest choice.

    Example:
        >>> check_choice("normalization", "batch", NORMALIZATIONS)
        'batch'
    """
    if value not in choices:
        raise errors.unknown(kind, value, choices)
    return str(value)


def check_style(activation: str, initializer: str, normalization: str, normalizations=NORMALIZATIONS) -> dict[str, str]:
    """Checks the three names that every builder takes, and returns them as keyword arguments.

    Raises:
        InputError: one of them is unknown; names the closest choice.

    Example:
        >>> check_style("relu", "he_normal", "batch")["initializer"]
        'he_normal'
    """
    return {
        "activation": check_choice("activation", activation, ACTIVATIONS),
        "initializer": check_choice("initializer", initializer, INITIALIZERS),
        "normalization": check_choice("normalization", normalization, normalizations),
    }


def check_shape(model: str, input_shape: object, dims: tuple[str, ...]) -> tuple[int, ...]:
    """Returns `input_shape` as a tuple of one whole number for each name in `dims`.

    Args:
        model: the builder's name, for errors.
        input_shape: the shape of one example, without the batch dimension.
        dims: the names of the dimensions, such as `("height", "width", "channels")`.

    Raises:
        InputError: the shape has another length, or other values.

    Example:
        >>> check_shape("cnn", [8, 8, 1], ("height", "width", "channels"))
        (8, 8, 1)
    """
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) and not isinstance(input_shape, str) else ()
    if len(shape) != len(dims) or not all(map(is_whole, shape)):
        named = ", ".join(dims) + ("," if len(dims) == 1 else "")
        raise InputError(
            f"Model {model!r} needs `input_shape` as ({named}) in whole numbers. "
            f"Received: input_shape={input_shape!r}. Use other data, or a model made for this shape."
        )
    return tuple(map(int, shape))


def normalize(x, kind: str, *, name: str, zero_gamma: bool = False):
    """Adds a normalization layer to `x`, or nothing for `"none"`.

    `"sync_batch"` computes its statistics over all replicas' examples, as one device would. `"group"` uses the most
    groups, up to 32, that divide the channels (Wu and He, 2018). `"layer"` normalizes the channels of each position.

    Args:
        x: a symbolic tensor; the last dim is the channels.
        kind: one of `NORMALIZATIONS`.
        name: the layer's name.
        zero_gamma: initialize the scale with zeros, so that a residual branch starts as zero.

    Returns:
        A symbolic tensor of the same shape.

    Example:
        >>> normalize(keras.Input((8, 8, 12)), "group", name="norm").shape
        (None, 8, 8, 12)
    """
    gamma = "zeros" if zero_gamma else "ones"
    if kind in ("batch", "sync_batch"):
        settings = {"momentum": BATCH_MOMENTUM, "epsilon": BATCH_EPSILON, "gamma_initializer": gamma, "name": name}
        return keras.layers.BatchNormalization(**settings, synchronized=kind == "sync_batch")(x)
    if kind == "group":
        groups = math.gcd(MOST_GROUPS, x.shape[-1])
        return keras.layers.GroupNormalization(groups, epsilon=BATCH_EPSILON, gamma_initializer=gamma, name=name)(x)
    if kind == "layer":
        return keras.layers.LayerNormalization(epsilon=LAYER_EPSILON, gamma_initializer=gamma, name=name)(x)
    return x


def convolve(
    x, channels, kernel, stride=1, *, activation, initializer, normalization, name, zero_gamma=False, activate=True
):
    """Adds a convolution, a normalization and, unless the sum with a shortcut comes first, the activation."""
    has_bias = normalization == "none"
    settings = {"padding": "same", "use_bias": has_bias, "kernel_initializer": initializer, "name": name}
    x = keras.layers.Conv2D(channels, kernel, strides=stride, **settings)(x)
    x = normalize(x, normalization, name=f"{name}_norm", zero_gamma=zero_gamma)
    return keras.layers.Activation(activation, name=f"{name}_activation")(x) if activate else x


def drop(x, rate: float, *, name: str):
    """Adds dropout to `x`, or nothing if the rate is 0.

    Example:
        >>> drop(keras.Input((4,)), 0.1, name="dropout").shape
        (None, 4)
    """
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def logits(x, classes: int, initializer: str = "glorot_uniform"):
    """Adds the last layer: one logit per class, computed in float32 whatever the dtype policy.

    float16 has about three digits: rounded logits cost more accuracy in the softmax and the loss than this layer costs
    time.

    Example:
        >>> logits(keras.Input((16,)), 10).dtype
        'float32'
    """
    return keras.layers.Dense(classes, kernel_initializer=initializer, dtype="float32", name="logits")(x)


def check_heads(width: int, heads: int) -> None:
    """Checks that the width divides evenly among the attention heads.

    Raises:
        InputError: it does not; names the nearest width that does.

    Example:
        >>> check_heads(64, 4)
    """
    if width % heads:
        nearest = max(1, round(width / heads)) * heads
        raise InputError(
            f"`width` must divide evenly among the heads. Received: width={width}, heads={heads}. Use width={nearest}."
        )


def attention_style(
    width: int, heads: int, mlp_width: int | None, activation, initializer, normalization, dropout, attention_dropout
) -> dict[str, object]:
    """Checks the common arguments of transformer blocks.

    Args:
        width: of the sequence; a multiple of `heads`.
        mlp_width: None for 4 * width.

    The other arguments, and the result, are those of `attend`.

    Raises:
        InputError: an invalid argument.

    Example:
        >>> common = dict(activation="gelu", initializer="glorot_uniform", normalization="layer")
        >>> rates = dict(dropout=0.0, attention_dropout=0.0)
        >>> attention_style(8, heads=2, mlp_width=None, **common, **rates)["mlp_width"]
        32
    """
    mlp_width = whole_number("mlp_width", 4 * width if mlp_width is None else mlp_width)
    check_heads(width, heads)
    return {
        "heads": heads,
        "mlp_width": mlp_width,
        **check_style(activation, initializer, normalization, ATTENTION_NORMALIZATIONS),
        "dropout": check_rate("dropout", dropout),
        "attention_dropout": check_rate("attention_dropout", attention_dropout),
    }


def attention_blocks(x, *, depth: int, causal: bool, recompute: bool, **style):
    """Adds learned positions, `depth` transformer blocks and the final normalization to a sequence.

    Args:
        x: symbolic tensor (batch, length, width).
        depth: number of blocks.
        causal: as in `attend`.
        recompute: whether each block is one `Recompute`.
        **style: the result of `attention_style`.

    Returns:
        A symbolic tensor of the same shape.
    """
    x = layers.PositionEmbedding(name="positions")(x)
    x = drop(x, style["dropout"], name="dropout")
    for i in range(1, depth + 1):
        add = functools.partial(attend, **style, causal=causal, name=f"block{i}")
        x = block(x, add, recompute=recompute, name=f"block{i}")
    return normalize(x, style["normalization"], name="norm")


def attend(
    x, *, heads, mlp_width, causal, activation, initializer, normalization, dropout, attention_dropout, name: str
):
    """Adds one pre-LN transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Pre-LN trains without warmup and at depths at which the original post-LN transformer does not (Xiong et al., 2020,
    "On Layer Normalization in the Transformer Architecture").

    Args:
        x: symbolic tensor (batch, length, width).
        heads: attention heads; `width` is a multiple of it.
        mlp_width: units of the MLP's hidden layer.
        causal: each position attends only to itself and earlier ones.
        activation: of the MLP's hidden layer.
        initializer: of every kernel.
        normalization: `"layer"` or `"none"`.
        dropout: after the attention, and after each layer of the MLP.
        attention_dropout: of the attention weights.
        name: prefix of the layers' names.

    Returns:
        A symbolic tensor of the same shape.

    Example:
        >>> style = dict(activation="gelu", initializer="glorot_uniform", normalization="layer")
        >>> rates = dict(dropout=0.0, attention_dropout=0.0)
        >>> attend(keras.Input((4, 8)), heads=2, mlp_width=16, causal=True, **style, **rates, name="b").shape
        (None, 4, 8)
    """
    width = x.shape[-1]
    y = normalize(x, normalization, name=f"{name}_norm1")
    y = keras.layers.MultiHeadAttention(
        heads, width // heads, dropout=attention_dropout, kernel_initializer=initializer, name=f"{name}_attention"
    )(y, y, use_causal_mask=causal)
    y = drop(y, dropout, name=f"{name}_dropout1")
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = normalize(x, normalization, name=f"{name}_norm2")
    y = keras.layers.Dense(mlp_width, kernel_initializer=initializer, name=f"{name}_mlp1")(y)
    y = keras.layers.Activation(activation, name=f"{name}_activation")(y)
    y = drop(y, dropout, name=f"{name}_dropout2")
    y = keras.layers.Dense(width, kernel_initializer=initializer, name=f"{name}_mlp2")(y)
    y = drop(y, dropout, name=f"{name}_dropout3")
    return keras.layers.Add(name=f"{name}_add2")([x, y])
