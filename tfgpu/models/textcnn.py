"""A small text classifier: convolutions over bytes."""

import functools
from collections.abc import Sequence

import keras

from tfgpu.errors import whole_number
from tfgpu.models import parts
from tfgpu.models.recompute import block


def textcnn(
    input_shape: Sequence[int | None] = (256,),
    classes: int = 2,
    *,
    vocabulary: int = 256,
    width: int = 64,
    depth: int = 3,
    kernel: int = 5,
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "layer",
    dropout: float = 0.2,
    recompute: bool = False,
) -> keras.Model:
    """Builds a convolutional classifier of token ids, such as the bytes of a text.

    Each of `depth` blocks is a convolution over `kernel` positions and a pooling that halves the length; the last layer
    gets each channel's maximum over all positions. A word therefore counts wherever it occurs, and padding, which is
    the same in every text, carries no information.

    Args:
        input_shape: (length,) of one example, in tokens; at least 2 ** depth.
        classes: number of outputs.
        vocabulary: number of tokens: ids are 0 to vocabulary - 1.
        width: channels.
        depth: number of blocks.
        kernel: kernel size, in positions.
        activation: a Keras activation's name.
        initializer: a Keras initializer's name, for the kernels.
        normalization: "batch", "sync_batch", "layer", "group" or "none".
        dropout: rate before the last layer.
        recompute: recompute each block's activations in the backward pass instead of storing them: less memory and
            more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model from (batch, length) int32 to logits in float32 (use a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument.

    Example:
        >>> textcnn((32,), 4, width=8).output_shape
        (None, 4)

    Source: after X. Zhang, J. Zhao and Y. LeCun, "Character-level Convolutional Networks for Text Classification",
        2015, arXiv:1509.01626.
    """
    shape = parts.check_shape("textcnn", input_shape, ("length",))
    wholes = {"classes": classes, "vocabulary": vocabulary, "width": width, "depth": depth, "kernel": kernel}
    for name, value in wholes.items():
        whole_number(name, value)
    whole_number("input_shape[0]", shape[0], minimum=2**depth)
    style = parts.check_style(activation, initializer, normalization)
    dropout = parts.check_rate("dropout", dropout)
    parts.check_flag("recompute", recompute)

    inputs = keras.Input(shape, dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary, width, name="embedding")(inputs)
    for i in range(1, depth + 1):
        add = functools.partial(_convolve, width=width, kernel=kernel, name=f"block{i}", **style)
        x = block(x, add, recompute=recompute, name=f"block{i}")
    x = keras.layers.GlobalMaxPooling1D(name="largest")(x)
    x = parts.drop(x, dropout, name="dropout")
    return keras.Model(inputs, parts.logits(x, classes), name="textcnn")


def _convolve(x, *, width: int, kernel: int, activation: str, initializer: str, normalization: str, name: str):
    x = keras.layers.Conv1D(width, kernel, padding="same", kernel_initializer=initializer, name=f"{name}_conv")(x)
    x = parts.normalize(x, normalization, name=f"{name}_norm")
    x = keras.layers.Activation(activation, name=f"{name}_activation")(x)
    return keras.layers.MaxPooling1D(2, name=f"{name}_pool")(x)
