"""`keras.ops` and TensorFlow's functions that compute in int32, or have no kernel for GPUs: they use the host.

TensorFlow's GPU kernels for int32 work in host memory.
"""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core.sparse import on_device
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def find_signs_on_device() -> None:
    """Reads a sign from unsigned bits, which a GPU compares itself; stock Keras compares int32.

    `keras.ops.argmax` and `argmin` read the sign of every value, so each accuracy copies all logits of a step to the
    host and waits for them. The result is the same.
    """

    @wrap("numpy.signbit")
    def signbit(stock, x):
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            return stock(x)
        bits = tf.bitcast(tf.cast(x, tf.float32), tf.uint32)
        return tf.greater(bits, tf.constant(0x7FFFFFFF, tf.uint32))


def find_largest_integers_on_device() -> None:
    """Finds the class of integer one-hot labels by top-k; argmax has no GPU kernel for integers.

    Both take the first of equal values.
    """

    @wrap("numpy.argmax")
    def argmax(stock, x, axis=None, keepdims=False):
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_integer or not x.shape.rank or axis not in (-1, x.shape.rank - 1):
            return stock(x, axis, keepdims)
        found = tf.math.top_k(x, 1).indices
        # In int64, because squeezing int32 works in host memory.
        return found if keepdims else tf.cast(tf.squeeze(tf.cast(found, tf.int64), -1), tf.int32)


def compare_on_device() -> None:
    """Compares int32 tensors as int64: labels, predicted classes and token ids, in Keras's code and in users' own.

    Scalars are unchanged: they are sizes, which the host needs.
    """
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):

        @wrap(f"numpy.{name}")
        def compare(stock, x1, x2):
            if any(isinstance(x, tf.Tensor) and x.dtype == tf.int32 and x.shape.rank != 0 for x in (x1, x2)):
                x1, x2 = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
                if x1.dtype == x2.dtype == tf.int32:
                    x1, x2 = tf.cast(x1, tf.int64), tf.cast(x2, tf.int64)
            return stock(x1, x2)


def look_up_on_device() -> None:
    """Looks up rows of a table, and sums its segments, by int64 indices; stock Keras compares and adds int32 ones.

    An `AUC` of several labels sums the segments of all labels at once, for which TensorFlow adds to the indices.
    """

    @wrap("numpy.take")
    def take(stock, x, indices, axis=None):
        if isinstance(indices, tf.Tensor) and indices.dtype == tf.int32 and indices.shape.rank != 0:
            indices = tf.cast(indices, tf.int64)
        return stock(x, indices, axis)

    @wrap("math.segment_sum")
    def segment_sum(stock, data, segment_ids, *args, **kwargs):
        if isinstance(segment_ids, tf.Tensor) and segment_ids.dtype == tf.int32:
            segment_ids = tf.cast(segment_ids, tf.int64)
        return stock(data, segment_ids, *args, **kwargs)


def argmax_copies_to_host() -> bool:
    """Whether the host computes a part of an argmax."""
    return bool(probing.left_to_host(keras.ops.argmax, tf.TensorSpec([64, 10])))


def integer_argmax_copies_to_host() -> bool:
    """Whether the host computes an argmax of integers."""

    def argmax(labels):
        return keras.ops.argmax(labels, axis=-1)

    return bool(probing.left_to_host(argmax, tf.TensorSpec([64, 10], tf.int64)))


def comparison_copies_to_host() -> bool:
    """Whether the host compares predicted classes."""

    def compare(scores):
        return keras.ops.equal(tf.argmax(scores, -1, tf.int32), 3)

    return bool(probing.left_to_host(compare, tf.TensorSpec([64, 10])))


def lookup_copies_to_host() -> bool:
    """Whether the host computes a part of a lookup."""

    def lookup(numbers):
        return keras.ops.take(tf.ones([50, 4]), numbers, axis=0)

    return "Less" in probing.left_to_host(lookup, tf.TensorSpec([64], tf.int32))


def padding_runs_on_host() -> bool:
    """Whether ragged vectors become dense on the host."""

    def padded(vectors):
        return tf.RaggedTensor.from_row_splits(vectors, tf.constant([0, 60, 64])).to_tensor()

    return "RaggedTensorToTensor" in probing.left_to_host(padded, tf.TensorSpec([64, 3]))


def ragged_sum_copies_to_host() -> bool:
    """Whether the host finds the rows of ragged values."""

    def rows(splits):
        return tf.ragged.row_splits_to_segment_ids(splits)

    return "Less" in probing.left_to_host(rows, tf.TensorSpec([65], tf.int64))


def sparse_lookup_counts_in_int32() -> bool:
    """Whether a lookup of sparse IDs has positions in int32, whose size its gradient asks for on the host."""

    @tf.function(autograph=False)
    def looked_up(table, ids):
        places = tf.stack([tf.range(64, dtype=tf.int64), tf.zeros([64], tf.int64)], 1)
        sparse, weights = (tf.SparseTensor(places, values, [64, 1]) for values in (ids, tf.ones([64])))
        return tf.nn.embedding_lookup_sparse(table, sparse, weights, combiner="sum")

    graph = looked_up.get_concrete_function(tf.TensorSpec([50, 4]), tf.TensorSpec([64], tf.int64)).graph
    return any(each.type == "Unique" and each.get_attr("out_idx") == tf.int32 for each in graph.get_operations())


REPAIRS = (
    Repair(
        name="signs-on-device",
        fault="on a GPU, argmax and every accuracy copy all logits to the host",
        issue="",
        probe=argmax_copies_to_host,
        apply=find_signs_on_device,
    ),
    Repair(
        name="integers-on-device",
        fault="on a GPU, integer one-hot labels are copied to the host for an accuracy",
        issue="",
        probe=integer_argmax_copies_to_host,
        apply=find_largest_integers_on_device,
    ),
    Repair(
        name="comparisons-on-device",
        fault="on a GPU, int32 predicted classes and labels are copied to the host for comparison",
        issue="",
        probe=comparison_copies_to_host,
        apply=compare_on_device,
    ),
    Repair(
        name="lookups-on-device",
        fault="on a GPU, int32 token IDs and an AUC's buckets are copied to the host",
        issue="",
        probe=lookup_copies_to_host,
        apply=look_up_on_device,
    ),
    Repair(
        name="padding-on-device",
        fault="on a GPU, ragged vectors are copied to the host to be padded, and back",
        issue="",
        probe=padding_runs_on_host,
        apply=on_device.pad_on_device,
    ),
    Repair(
        name="ragged-rows-on-device",
        fault="on a GPU, sums over ragged rows copy the rows' lengths to the host",
        issue="",
        probe=ragged_sum_copies_to_host,
        apply=on_device.find_rows_on_device,
    ),
    Repair(
        name="sparse-lookups-on-device",
        fault="on a GPU, the gradient of a layer of sparse inputs copies their positions to the host",
        issue="",
        probe=sparse_lookup_counts_in_int32,
        apply=on_device.look_up_sparse_on_device,
    ),
)
