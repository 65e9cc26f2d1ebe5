"""A small language model: maps token ids to a logit for each possible next token, at every position."""

from collections.abc import Sequence

import keras

from tfgpu.errors import whole_number
from tfgpu.models import parts


def transformer(
    input_shape: Sequence[int | None] = (64,),
    classes: int = 256,
    *,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    mlp_width: int | None = None,
    activation: str = "gelu",
    initializer: str = "glorot_uniform",
    normalization: str = "layer",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    recompute: bool = False,
) -> keras.Model:
    """Builds a causal, decoder-only, pre-LN transformer with learned positions, like GPT-2.

    The output at a position depends only on the tokens up to it; train it on targets that are the inputs shifted by
    one.

    Args:
        input_shape: (length,) of one example, in tokens.
        classes: size of the vocabulary: ids are 0 to classes - 1.
        width: units per position.
        depth: number of transformer blocks.
        heads: attention heads; divides `width`.
        mlp_width: hidden units of each block's MLP. Default: 4 times `width`.
        activation: a Keras activation's name.
        initializer: a Keras initializer's name, for the kernels.
        normalization: "layer" or "none", before each attention and MLP.
        dropout: rate after the positions are added and after each attention and MLP layer.
        attention_dropout: rate of the attention weights.
        recompute: recompute each block's activations in the backward pass instead of storing them: less memory and
            more time for the same result (see `Recompute`).

    Returns:
        A functional Keras model from (batch, length) int32 to (batch, length, classes) logits in float32 (use
        a loss with `from_logits=True`).

    Raises:
        InputError: an invalid argument, such as a width that the heads do not divide.

    Example:
        >>> transformer((16,), 100, width=32, heads=2).output_shape
        (None, 16, 100)

    Source: Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"
    """
    shape = parts.check_shape("transformer", input_shape, ("length",))
    for name, value in {"classes": classes, "width": width, "depth": depth, "heads": heads}.items():
        whole_number(name, value)
    style = parts.attention_style(
        width, heads, mlp_width, activation, initializer, normalization, dropout, attention_dropout
    )
    parts.check_flag("recompute", recompute)

    inputs = keras.Input(shape, dtype="int32", name="tokens")
    # Small, like the initial positions, so that neither dominates (GPT-2's value).
    spread = keras.initializers.RandomNormal(stddev=0.02)
    x = keras.layers.Embedding(classes, width, embeddings_initializer=spread, name="embedding")(inputs)
    x = parts.attention_blocks(x, depth=depth, causal=True, recompute=recompute, **style)
    return keras.Model(inputs, parts.logits(x, classes), name="transformer")
