"""The forms in which replicas exchange values: the dtype, and the position.

Between GPUs, TensorFlow's NCCL takes float16, float32, float64, int32 and int64 (`nccl_manager.cc`), and its ring adds
int32 on the host, where it crashes on a GPU's addresses. So bfloat16 and small numbers travel as float32, which holds
them, and their sums up to 2**24, exactly. 32-bit integers travel as float64, also exactly, and 64-bit ones as two of
them: TensorFlow can neither pad nor split int64 on a GPU, and would copy it to the host. The same rule holds on all
devices.
"""

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core.replication import replica_context, replica_number

_SMALL = ("bool", "int8", "uint8", "int16", "uint16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SUMMED_AS = dict.fromkeys(map(tf.as_dtype, _SMALL), tf.float32) | {tf.int32: tf.float64, tf.uint32: tf.float64}
_LONG = (tf.int64, tf.uint64)
_CARRIERS = {2: tf.float16, 4: tf.float32, 8: tf.float64}
"""By size in bytes: dtypes that carry any bits through a gather, which does not compute."""

HOST_PACK_BYTES = 64 << 10
"""Values up to this size share one copy to the host: each copy alone costs about 10 us."""


def to_sum(value: tf.Tensor) -> tf.Tensor:
    """A value in the form in which replicas sum it; 64-bit integers get one more axis, for their two halves."""
    if value.dtype not in _LONG:
        return tf.cast(value, _SUMMED_AS.get(value.dtype, value.dtype))
    halves = tf.cast(tf.bitcast(tf.cast(value, tf.int64), tf.int32), tf.float64)
    low = halves[..., 0]
    return tf.stack([tf.where(low < 0, low + 2.0**32, low), halves[..., 1]], -1)


def from_sum(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The sum of values of a dtype, from the sum of what `to_sum` returned for them."""
    if dtype not in _LONG:
        return tf.cast(total, dtype)
    low, high = (tf.cast(total[..., half], tf.int64) for half in (0, 1))
    return tf.cast(low + high * 2**32, dtype)


def dtype_of_sum(dtype: tf.DType) -> tf.DType:
    """The dtype of what `to_sum` returns for values of a dtype.

    Example:
        >>> dtype_of_sum(tf.bfloat16), dtype_of_sum(tf.float16)
        (tf.float32, tf.float16)
    """
    return tf.float64 if dtype in _LONG else _SUMMED_AS.get(dtype, dtype)


def carrier(dtype: tf.DType) -> tf.DType:
    """The dtype whose tensors carry the bits of values of a dtype, of 16 bits or more, through a gather.

    Example:
        >>> carrier(tf.bfloat16), carrier(tf.float32)
        (tf.float16, tf.float32)
    """
    return _CARRIERS[dtype.size]


def to_carrier(value: tf.Tensor, dtype: tf.DType | None = None) -> tf.Tensor:
    """A value's bits in its carrier, or with one more axis in a narrower `dtype`. `tf.bitcast` undoes it."""
    return tf.bitcast(value, carrier(value.dtype) if dtype is None else dtype)


def at_own_place(value: tf.Tensor, at: int | tf.Tensor | None = None) -> tf.Tensor:
    """This replica's value at its position in a table of all replicas' values, else zeros, so that a sum stacks them.

    The value is padded, not multiplied by 0 and 1: a GPU may round a matrix product to TF32, and NaN times 0 is NaN.

    Args:
        value: has the same shape on all replicas, and a known rank.
        at: its position, from 0; None takes the replica's number.

    Returns:
        A tensor [replicas, *value.shape].
    """
    context = replica_context()
    at, count = replica_number(context) if at is None else at, context.num_replicas_in_sync
    placed = tf.pad(value[None], [[at, count - 1 - at], *[[0, 0]] * value.shape.rank])
    return tf.ensure_shape(placed, [count, *value.shape])


def set_reduce_dtype(strategy: tf.distribute.Strategy, dtype: str) -> None:
    """Makes a strategy's replicas exchange gradients in a narrower dtype."""
    slots.of(strategy).reduce_dtype = tf.as_dtype(dtype)


def to_reduce_dtype(values: list) -> list:
    """Gradients (tensors, IndexedSlices or None) in the dtype in which replicas exchange them."""
    dtype = slots.get(tf.distribute.get_strategy(), "reduce_dtype")
    return list(values) if dtype is None else [_cast(v, dtype) if _is_wider(v, dtype) else v for v in values]


def from_reduce_dtype(values: list, like: list) -> list:
    """Exchanged gradients, each in the dtype of the value at its position in `like`."""
    return [v if v is None or v.dtype == w.dtype else _cast(v, w.dtype) for v, w in zip(values, like, strict=True)]


def dtype_sent(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.DType:
    """The dtype in which a gradient is sent."""
    narrow = slots.get(strategy, "reduce_dtype")
    if narrow is not None and (value.dtype == narrow or _is_wider(value, narrow)):
        return narrow
    return dtype_of_sum(value.dtype)


def _is_wider(value, dtype: tf.DType) -> bool:
    return value is not None and value.dtype.is_floating and value.dtype.size > dtype.size


def _cast(value, dtype: tf.DType):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return tf.cast(value, dtype)


def packs_to_host(columns: list) -> list[list[int]]:
    """The positions of values that are copied to the host as one tensor: small ones, of one dtype.

    Args:
        columns: of each value, the replicas' own. A replica without rows may know less of its shape.
    """
    packs, small = [], {}
    for at, column in enumerate(columns):
        first = column[0]
        count = None if isinstance(first, tf.IndexedSlices) else first.shape.num_elements()
        is_alike = count is not None and all(value.shape.is_fully_defined() for value in column)
        if not is_alike or count * first.dtype.size > HOST_PACK_BYTES:
            packs.append([at])
        else:
            small.setdefault((first.dtype, len(column)), []).append(at)
    return [*packs, *small.values()]


def packed(values: list) -> tf.Tensor | tf.IndexedSlices:
    """A replica's values of one pack as one tensor, on their device; one value as it is."""
    if len(values) == 1:
        return values[0]
    with tf.device(values[0].device):
        return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def unpacked(total: tf.Tensor | tf.IndexedSlices, values: list, pack: list[int]) -> dict[int, tf.Tensor]:
    """By position, each value's part of a pack's sum; `values` are those of the replica that gets them."""
    if len(pack) == 1:
        return {pack[0]: total}
    parts = tf.split(total, [values[at].shape.num_elements() for at in pack])
    return {at: tf.reshape(part, values[at].shape) for at, part in zip(pack, parts, strict=True)}
