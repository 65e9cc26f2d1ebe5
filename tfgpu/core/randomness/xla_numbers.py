"""The random numbers that XLA makes of a seed, by TensorFlow's operations.

XLA and TensorFlow's kernels draw the same bits (Philox) and make other floats of them. Where XLA compiles the step of
one device and not all of a replica's, these functions give the replica one device's numbers: uniform and categorical
draws bit for bit, normal and truncated ones to rounding. Source: `xla/hlo/builder/lib/prng.cc` in OpenXLA and
`tensorflow/compiler/tf2xla/lib/random.cc`.
"""

import math

import numpy as np
import tensorflow as tf

from tfgpu.compat.tensorflow import tensor_util

_BITS = {"float32": (tf.uint32, 9), "float64": (tf.uint64, 12)}  # the bits of a number, and how many are dropped
Size = int | tf.Tensor


def uniform(shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: str) -> tf.Tensor:
    """Floats from 0 to 1.

    Args:
        shape: int32 of shape [rank].
        key: uint64 of shape [1].
        counter: uint64 of shape [2].
        dtype: of the result.
    """
    dtype, how = tf.as_dtype(dtype), dict(shape=shape, key=key, counter=counter, alg=tf.random.Algorithm.PHILOX.value)
    if dtype == tf.float16:  # the one dtype of which both make the same
        return tf.raw_ops.StatelessRandomUniformV2(dtype=dtype, **how)
    computed = computed_dtype(dtype)
    bits_dtype, dropped = _BITS[computed]
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=bits_dtype, **how)
    highest = tf.bitwise.right_shift(bits, tf.constant(dropped, bits_dtype))
    unit = tf.constant(2.0 ** (dropped - 8 * bits_dtype.size), computed)
    return _as_bfloat16(tf.cast(highest, computed) * unit, dtype)


def is_uniform_at_least(limit: float, shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: str) -> tf.Tensor:
    """Whether each number of `uniform` is at least `limit`, which is rounded to `dtype`: a mask without the floats."""
    dtype = tf.as_dtype(dtype)
    if dtype == tf.float16:
        return uniform(shape, key, counter, dtype) >= limit
    bits_dtype, dropped = _BITS[computed_dtype(dtype)]
    limit = float(np.asarray(limit, dtype.as_numpy_dtype))
    if limit == 1:  # as 0.999 in bfloat16
        return tf.zeros(shape, tf.bool)
    least = math.ceil(limit * 2 ** (8 * bits_dtype.size - dropped))
    how = dict(shape=shape, key=key, counter=counter, alg=tf.random.Algorithm.PHILOX.value)
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=bits_dtype, **how)
    return bits >= tf.constant(least << dropped, bits_dtype)


def normal(shape: tf.Tensor, seed: tf.Tensor, dtype: str) -> tf.Tensor:
    """Normal numbers of mean 0 and deviation 1. A number's partner, and so its value, depends on the whole shape.

    Args:
        shape: int32 of shape [rank].
        seed: int32 of shape [2].
        dtype: of the result.
    """
    static = tensor_util.constant_value_as_shape(shape)
    computed = computed_dtype(dtype)
    outer, size, inner = _paired_axis(shape, static)
    half = (size + 1) // 2
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    pairs = uniform(tf.stack([outer, half, 2, inner]), key, counter, computed)
    radius = tf.maximum(pairs[:, :, 0], tf.constant(1e-7, computed))
    radius = tf.sqrt(tf.constant(-2, computed) * tf.math.log(radius))
    angle = tf.constant(2 * math.pi, computed) * pairs[:, :, 1]
    both = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], 2)
    numbers = tf.reshape(tf.reshape(both, tf.stack([outer, 2 * half, inner]))[:, :size], shape)
    numbers.set_shape(static)
    return _as_bfloat16(numbers, dtype)


def truncated_normal(uniform_numbers: tf.Tensor, dtype: str) -> tf.Tensor:
    """Normal numbers from -2 to 2, each from one of `uniform`."""
    computed = computed_dtype(dtype)
    low, high = ((1 + math.erf(end / math.sqrt(2))) / 2 for end in (-2.0, 2.0))
    place = tf.constant(low, computed) + tf.constant(high - low, computed) * _above_zero(uniform_numbers)
    place = place * tf.constant(2, computed) - tf.constant(1, computed)
    wide = tf.cast(place, "float64" if computed == "float64" else "float32")  # no other kernel inverts the function
    return _as_bfloat16(tf.constant(math.sqrt(2), computed) * tf.cast(tf.math.erfinv(wide), computed), dtype)


def categorical(uniform_numbers: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Classes, drawn by the Gumbel-max trick.

    Args:
        uniform_numbers: of shape [rows, samples, classes].
        logits: of shape [rows, classes].

    Returns:
        int64 of shape [rows, samples].
    """
    gumbel = tf.math.log(-tf.math.log(_above_zero(uniform_numbers)))
    return tf.argmax(logits[:, None] - tf.cast(gumbel, logits.dtype), -1)


def computed_dtype(dtype: str) -> str:
    """The dtype in which XLA computes numbers of `dtype`."""
    return "float32" if tf.as_dtype(dtype) == tf.bfloat16 else tf.as_dtype(dtype).name


def _paired_axis(shape: tf.Tensor, static: tf.TensorShape) -> tuple[Size, Size, Size]:
    """The axis along which two neighbors share a pair of uniform numbers: the first of even size, or else the longest.

    Returns:
        The product of the sizes before it, its size, and the product of those behind it.
    """
    sizes = [shape[axis] if size is None else size for axis, size in enumerate(static.as_list())] or [1]
    ways = [(_product(sizes[:axis]), size, _product(sizes[axis + 1 :])) for axis, size in enumerate(sizes)]
    chosen = ways[0]
    for way in ways[1:]:
        chosen = _either(way[1] > chosen[1], way, chosen)
    for way in reversed(ways):
        chosen = _either(way[1] % 2 == 0, way, chosen)
    return chosen


def _product(sizes: list[Size]) -> Size:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else tf.reduce_prod(tf.stack(sizes))


def _either(condition: bool | tf.Tensor, one: tuple, other: tuple) -> tuple:
    if isinstance(condition, bool):
        return one if condition else other
    return tuple(tf.where(condition, *sizes) for sizes in zip(one, other, strict=True))


def _above_zero(numbers: tf.Tensor) -> tf.Tensor:
    least = tf.constant(np.finfo(numbers.dtype.as_numpy_dtype).tiny, numbers.dtype)
    return numbers * (tf.constant(1, numbers.dtype) - least) + least


def _as_bfloat16(numbers: tf.Tensor, dtype: str) -> tf.Tensor:
    """The numbers in `dtype`; XLA cuts off what bfloat16 cannot hold."""
    if tf.as_dtype(dtype) != tf.bfloat16:
        return numbers
    cut = tf.bitwise.bitwise_and(tf.bitcast(numbers, tf.uint32), tf.constant(0xFFFF0000, tf.uint32))
    return tf.cast(tf.bitcast(cut, tf.float32), tf.bfloat16)
