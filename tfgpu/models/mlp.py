"""A multilayer perceptron: the fastest model, whose steps are dominated by overhead."""

import functools
from collections.abc import Sequence

import keras

from tfgpu.errors import InputError, whole_number
from tfgpu.models import parts
from tfgpu.models.recompute import block


def mlp(
    input_shape: Sequence[int | None] = (8, 8, 1),
    classes: int = 10,
    *,
    widths: Sequence[int] = (256, 128),
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "none",
    dropout: float = 0.0,
    recompute: bool = False,
) -> keras.Model:
    """Builds an MLP for inputs of any shape, which it flattens.

    Args:
        input_shape: shape of one example, without the batch dimension.
        classes: number of outputs.
        widths: units of each hidden layer; an empty list gives a linear model.
        activation: a Keras activation's name.
        initializer: a Keras initializer's name, for the hidden layers (He et al., 2015, suits relu).
        normalization: before each activation: "batch", "sync_batch", "layer", "group" or "none".
        dropout: rate after each hidden layer.
        recompute: recompute each hidden layer's activations in the backward pass instead of storing them: less memory
            and more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model whose outputs are logits in float32 (use a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument.

    Example:
        >>> mlp((8, 8, 1), 10, widths=(32,)).count_params()
        2410
    """
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        raise InputError(f"`input_shape` must be a list of whole numbers. Received: input_shape={input_shape!r}.")
    shape = parts.check_wholes("input_shape", input_shape)
    widths = parts.check_wholes("widths", widths, fewest=0)
    whole_number("classes", classes)
    style = parts.check_style(activation, initializer, normalization)
    dropout = parts.check_rate("dropout", dropout)
    parts.check_flag("recompute", recompute)

    inputs = keras.Input(shape, name="inputs")
    x = keras.layers.Flatten(name="flatten")(inputs) if len(shape) > 1 else inputs
    for i, units in enumerate(widths, start=1):
        add = functools.partial(_hidden, units=units, dropout=dropout, number=i, **style)
        x = block(x, add, recompute=recompute, name=f"hidden{i}")
    return keras.Model(inputs, parts.logits(x, classes), name="mlp")


def _hidden(x, *, units: int, dropout: float, number: int, activation: str, initializer: str, normalization: str):
    has_bias = normalization == "none"
    x = keras.layers.Dense(units, use_bias=has_bias, kernel_initializer=initializer, name=f"dense{number}")(x)
    x = parts.normalize(x, normalization, name=f"norm{number}")
    x = keras.layers.Activation(activation, name=f"activation{number}")(x)
    return parts.drop(x, dropout, name=f"dropout{number}")
