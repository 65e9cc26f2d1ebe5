"""What strategies share in a process or a cluster: collective keys, initial values of variables, and a warning.

Each strategy of a process gets its own collective keys. `keras.distribution` does nothing on TensorFlow.
"""

import itertools
import warnings

import keras
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.compat.patch import wrap
from tfgpu.core.workers import ledger
from tfgpu.repairs import Repair, probes, probing

KEYS_A_STRATEGY = 100_000
"""The distance between two strategies' keys in TensorFlow's own tests."""


def separate_collective_keys() -> None:
    """Gives each strategy of a process its own range of collective keys.

    TensorFlow names a collective by a group key and an instance key, and never forgets one. Every new strategy starts
    at the same numbers, so a second MirroredStrategy meets the first one's leftovers: "Shape mismatch in the collective
    instance", a wrong sum, or the death of the process. Notebooks, tests and searches make many strategies. Those of
    several workers share the collectives that the first one has started.
    """
    for kind in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        numbers = itertools.count(1)  # 0 belongs to strategies made before this repair

        @wrap(f"tf.distribute.{kind}.__init__")
        def init(stock, self, *args, numbers=numbers, **kwargs):
            distribute.set_collective_key_base(self, KEYS_A_STRATEGY * next(numbers))
            with distribute.started_collectives_kept():
                stock(self, *args, **kwargs)


@probes("a second MirroredStrategy in one process reuses the first one's collective keys")
def second_strategy_reuses_keys() -> bool:
    """Whether two strategies of one process use the same collective keys."""
    first, second = probing.mirrored(), probing.mirrored()
    return distribute.first_group_key(first) == distribute.first_group_key(second)


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


@probes("a variable of bfloat16 or 8 bits cannot be created on several workers")
def bfloat16_is_refused() -> bool:
    """Whether TensorFlow cannot broadcast bfloat16."""
    return tf.bfloat16 not in distribute.broadcast_dtypes()


def warn_about_distribution() -> None:
    """Warns that a distribution has no effect: Keras's TensorFlow backend leaves its hooks empty."""
    for owner in ("keras.distribution", "distribution_lib"):

        @wrap(f"{owner}.set_distribution")
        def set_distribution(stock, value):
            if value is not None:
                warnings.warn(
                    f"keras.distribution does nothing on TensorFlow: with {type(value).__name__} the model stays on "
                    "one device. Create the model under `with tfgpu.strategy().scope():` instead.",
                    stacklevel=3,
                )
            return stock(value)


@probes("keras.distribution silently does nothing on TensorFlow")
def distribution_is_silent() -> bool:
    """Whether a distribution over two devices silently leaves a variable on one."""
    before = keras.distribution.distribution()
    try:
        parallel = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    except AttributeError:  # up to Keras 3.14 it cannot be created on TensorFlow, which is an error and not silent
        return False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keras.distribution.set_distribution(parallel)
        value = keras.Variable([1.0]).value
        keras.distribution.set_distribution(before)
    return not said and not isinstance(value, tf.distribute.DistributedValues)


REPAIRS = (
    Repair(
        "collective-keys",
        second_strategy_reuses_keys,
        separate_collective_keys,
        issue="https://github.com/tensorflow/tensorflow/issues/62790",
    ),
    Repair("first-values", bfloat16_is_refused, broadcast_all_dtypes),
    Repair("no-distribution", distribution_is_silent, warn_about_distribution, since="3.15"),
)
