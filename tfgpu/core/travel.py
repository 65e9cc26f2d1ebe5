"""The forms in which values travel between replicas: in which dtype, and at which place.

Between GPUs, TensorFlow's NCCL takes float16, float32, float64, int32 and int64 (`nccl_manager.cc`), and its ring adds
int32 on the host, where it crashes on a GPU's addresses. So bfloat16 and small numbers travel as float32, which holds
them, and their sums up to 2**24, exactly. Whole numbers of 32 bits travel as float64, as exactly, and not as int64,
which TensorFlow can neither pad nor split on a GPU. One rule holds on all devices.
"""

import tensorflow as tf

from tfgpu.core.replication import replica_context, replica_number

_SMALL = ("bool", "int8", "uint8", "int16", "uint16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SUMMED_AS = dict.fromkeys(map(tf.as_dtype, _SMALL), tf.float32)
_SUMMED_AS |= {tf.int32: tf.float64, tf.uint32: tf.float64, tf.uint64: tf.int64}
_CARRIERS = {2: tf.float16, 4: tf.float32, 8: tf.float64}
"""By their size in bytes: what holds any bits in a gather, which does not compute."""


def sum_dtype(dtype: tf.DType) -> tf.DType:
    """The dtype in which replicas sum values of a dtype.

    Example:
        >>> sum_dtype(tf.bfloat16), sum_dtype(tf.int32), sum_dtype(tf.float16)
        (tf.float32, tf.float64, tf.float16)
    """
    return _SUMMED_AS.get(dtype, dtype)


def carrier(dtype: tf.DType) -> tf.DType:
    """The dtype whose tensors carry the bits of values of a dtype, of 16 bits or more, through a gather.

    Example:
        >>> carrier(tf.bfloat16), carrier(tf.float32)
        (tf.float16, tf.float32)
    """
    return _CARRIERS[dtype.size]


def to_carrier(value: tf.Tensor, dtype: tf.DType | None = None) -> tf.Tensor:
    """A value's bits in its carrier; in narrower ones of `dtype`, with one more axis."""
    return tf.bitcast(value, carrier(value.dtype) if dtype is None else dtype)


def from_carrier(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The values of which `to_carrier` has made bits; where those are narrower, their last axis goes."""
    return tf.bitcast(bits, dtype)


def at_own_place(value: tf.Tensor, at: int | tf.Tensor | None = None) -> tf.Tensor:
    """This replica's value at its place in a table of all replicas', with zeros elsewhere, so that a sum stacks them.

    The value is padded, not multiplied by 0 and 1: a GPU may round a matrix product to TF32, and NaN times 0 is NaN.

    Args:
        value: of the same shape on all replicas, and of known rank.
        at: its place, from 0; None is the number of the replica.

    Returns:
        A tensor [replicas, *value.shape].
    """
    context = replica_context()
    at, count = replica_number(context) if at is None else at, context.num_replicas_in_sync
    return tf.ensure_shape(between_zeros(value[None], at, count - 1 - at), [count, *value.shape])


def between_zeros(rows: tf.Tensor, before: int | tf.Tensor, after: int | tf.Tensor) -> tf.Tensor:
    """Rows with so many rows of zeros before and after them."""
    if rows.dtype != tf.int64:
        return tf.pad(rows, [[before, after], *[[0, 0]] * (rows.shape.rank - 1)])
    parts = [tf.zeros(tf.concat([[count], tf.shape(rows)[1:]], 0), rows.dtype) for count in (before, after)]
    return tf.concat([parts[0], rows, parts[1]], 0)
