"""Numbers in 8 or 16 bits, each block of 256 scaled by its largest magnitude.

In 8 bits a number is the position of the nearest one in a table of 256. The tables are those of dynamic tree
quantization: the number of leading zeros is an exponent of ten, the bits after it a fraction, so that small numbers and
large ones have a like relative error.

Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021
(https://arxiv.org/abs/2110.02861).
"""

import functools

import numpy as np
import tensorflow as tf

BLOCK = 256
"""How many numbers share a scale."""
_EXPONENTS = 7


@functools.cache
def table(is_signed: bool) -> np.ndarray:
    """The 256 numbers of 8 bits, ascending, the largest of which is 1.

    Example:
        >>> found = table(True)
        >>> found.shape, float(found[-1]), f"{table(False)[1]:.2e}"
        ((256,), 1.0, '3.25e-07')
    """
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2 ** (exponent + (0 if is_signed else 1)) + 1
        edges = np.linspace(0.1, 1.0, count)
        fractions = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - _EXPONENTS + 1)
        found += [*fractions, *(-fractions if is_signed else ())]
    return np.sort(np.array(found, "float32"))


def blocks_of(count: int) -> int:
    """How many blocks so many numbers make."""
    return -(-count // BLOCK)


def quantize(value: tf.Tensor, dtype: str, is_signed: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor in few bits.

    Args:
        value: of any static shape.
        dtype: of the result: `"uint8"` or `"bfloat16"`.
        is_signed: whether there are numbers below 0. If not, a number above 0 does not become 0, as it may be divided
            by.

    Returns:
        The numbers, of the tensor's shape, and the scales [blocks], float32.
    """
    count = value.shape.num_elements()
    flat = tf.reshape(tf.cast(value, tf.float32), [-1])
    rows = tf.reshape(tf.pad(flat, [[0, blocks_of(count) * BLOCK - count]]), [-1, BLOCK])
    scales = tf.reduce_max(tf.abs(rows), 1)
    normed = tf.reshape(tf.math.divide_no_nan(rows, scales[:, None]), [-1])[:count]
    if dtype == "bfloat16":
        return tf.reshape(tf.cast(normed, tf.bfloat16), value.shape), scales
    numbers = table(is_signed)
    codes = tf.searchsorted(tf.constant((numbers[:-1] + numbers[1:]) / 2), normed)
    if not is_signed:
        codes = tf.where(normed > 0, tf.maximum(codes, 1), codes)
    return tf.reshape(tf.cast(codes, tf.uint8), value.shape), scales


def dequantize(codes: tf.Tensor, scales: tf.Tensor, is_signed: bool) -> tf.Tensor:
    """The inverse of `quantize`, but for what it has rounded: float32."""
    count = codes.shape.num_elements()
    is_table = codes.dtype == tf.uint8
    normed = (
        tf.gather(tf.constant(table(is_signed)), tf.cast(codes, tf.int32)) if is_table else tf.cast(codes, tf.float32)
    )
    flat = tf.pad(tf.reshape(normed, [-1]), [[0, blocks_of(count) * BLOCK - count]])
    rows = tf.reshape(flat, [-1, BLOCK]) * scales[:, None]
    return tf.reshape(tf.reshape(rows, [-1])[:count], codes.shape)
