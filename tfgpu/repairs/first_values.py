"""Initial values of variables on several workers: TensorFlow broadcasts the chief's."""

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.compat.patch import wrap
from tfgpu.core.workers import ledger
from tfgpu.repairs.repair import Repair


def broadcast_all_dtypes() -> None:
    """Allows variables of all dtypes on several workers.

    TensorFlow's broadcast takes bool, float16, float32, float64, int32 and int64, and so refuses a variable of
    bfloat16, float8 or int8. Other dtypes are sent in a wider one, which holds them exactly.
    """

    @wrap("collective_ops.broadcast_send")
    def broadcast_send(stock, t, shape, dtype, *args, **kwargs):
        sent = _sent_as(dtype)
        with ledger.waiting():
            if sent == dtype:
                return stock(t, shape, dtype, *args, **kwargs)
            return tf.cast(stock(tf.cast(t, sent), shape, sent, *args, **kwargs), dtype)

    @wrap("collective_ops.broadcast_recv")
    def broadcast_recv(stock, shape, dtype, *args, **kwargs):
        sent = _sent_as(dtype)
        with ledger.waiting():
            received = stock(shape, sent, *args, **kwargs)
        return received if sent == dtype else tf.cast(received, dtype)


def _sent_as(dtype: tf.DType) -> tf.DType:
    """A dtype that TensorFlow can broadcast, and that holds all values of a dtype."""
    dtype = tf.as_dtype(dtype)
    if dtype in distribute.broadcast_dtypes():
        return dtype
    return tf.float32 if dtype.is_floating else tf.int64 if dtype.is_integer else dtype


def bfloat16_is_refused() -> bool:
    """Whether TensorFlow cannot broadcast bfloat16."""
    return tf.bfloat16 not in distribute.broadcast_dtypes()


REPAIRS = (
    Repair(
        name="first-values",
        fault="a variable of bfloat16 or 8 bits cannot be created on several workers",
        issue="",
        probe=bfloat16_is_refused,
        apply=broadcast_all_dtypes,
    ),
)
