"""`keras.ops` and TensorFlow's functions that compute in int32, or have no kernel for GPUs: they use the host.

TensorFlow's GPU kernels for int32 work in host memory.
"""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core.sparse import on_device
from tfgpu.repairs import Repair, probes, probing


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


@probes("on a GPU, argmax and every accuracy copy all logits to the host")
def argmax_copies_to_host() -> bool:
    """Whether the host computes a part of an argmax."""
    return bool(probing.left_to_host(keras.ops.argmax, tf.TensorSpec([64, 10])))


@probes("on a GPU, integer one-hot labels are copied to the host for an accuracy")
def integer_argmax_copies_to_host() -> bool:
    """Whether the host computes an argmax of integers."""
    spec = tf.TensorSpec([64, 10], tf.int64)
    return bool(probing.left_to_host(lambda labels: keras.ops.argmax(labels, axis=-1), spec))


@probes("on a GPU, int32 predicted classes and labels are copied to the host for comparison")
def comparison_copies_to_host() -> bool:
    """Whether the host compares predicted classes."""
    spec = tf.TensorSpec([64, 10])
    return bool(probing.left_to_host(lambda scores: keras.ops.equal(tf.argmax(scores, -1, tf.int32), 3), spec))


@probes("on a GPU, int32 token IDs and an AUC's buckets are copied to the host")
def lookup_copies_to_host() -> bool:
    """Whether the host computes a part of a lookup."""
    spec = tf.TensorSpec([64], tf.int32)
    return "Less" in probing.left_to_host(lambda at: keras.ops.take(tf.ones([50, 4]), at, axis=0), spec)


@probes("on a GPU, ragged vectors are copied to the host to be padded, and back")
def padding_runs_on_host() -> bool:
    """Whether ragged vectors become dense on the host."""

    def padded(vectors):
        return tf.RaggedTensor.from_row_splits(vectors, tf.constant([0, 60, 64])).to_tensor()

    return "RaggedTensorToTensor" in probing.left_to_host(padded, tf.TensorSpec([64, 3]))


@probes("on a GPU, sums over ragged rows copy the rows' lengths to the host")
def ragged_sum_copies_to_host() -> bool:
    """Whether the host finds the rows of ragged values."""
    return "Less" in probing.left_to_host(tf.ragged.row_splits_to_segment_ids, tf.TensorSpec([65], tf.int64))


@probes("on a GPU, the gradient of a layer of sparse inputs copies their positions to the host")
def sparse_lookup_counts_in_int32() -> bool:
    """Whether a lookup of sparse IDs has positions in int32, whose size its gradient asks for on the host."""

    @tf.function(autograph=False)
    def looked_up(table, ids):
        places = tf.stack([tf.range(64, dtype=tf.int64), tf.zeros([64], tf.int64)], 1)
        sparse, weights = (tf.SparseTensor(places, values, [64, 1]) for values in (ids, tf.ones([64])))
        return tf.nn.embedding_lookup_sparse(table, sparse, weights, combiner="sum")

    graph = looked_up.get_concrete_function(tf.TensorSpec([50, 4]), tf.TensorSpec([64], tf.int64)).graph
    return any(each.type == "Unique" and each.get_attr("out_idx") == tf.int32 for each in graph.get_operations())


def flatten_labels_on_device() -> None:
    """Flattens sequences before stock Keras casts their labels to int32; the result is the same."""

    @wrap("accuracy_metrics.sparse_top_k_categorical_accuracy")
    def sparse_accuracy(stock, y_true, y_pred, *args, **kwargs):
        y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
        if not y_true.shape.rank or y_true.shape.rank < 2 or not y_pred.shape.rank or y_pred.shape.rank < 3:
            return stock(y_true, y_pred, *args, **kwargs)
        if y_true.dtype == tf.int32:
            y_true = tf.cast(y_true, tf.int64)
        found = stock(tf.reshape(y_true, [-1]), _flat(y_pred), *args, **kwargs)
        return tf.reshape(found, tf.shape(y_true))

    @wrap("accuracy_metrics.top_k_categorical_accuracy")
    def accuracy(stock, y_true, y_pred, *args, **kwargs):
        y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
        if not y_true.shape.rank or y_true.shape.rank < 3 or y_true.shape.rank != y_pred.shape.rank:
            return stock(y_true, y_pred, *args, **kwargs)
        found = stock(_flat(y_true), _flat(y_pred), *args, **kwargs)
        return tf.reshape(found, tf.shape(y_true)[:-1])


def _flat(scores: tf.Tensor) -> tf.Tensor:
    return tf.reshape(scores, [-1, scores.shape[-1]])


@probes("on a GPU, a top-k accuracy of sequences copies all labels to the host")
def labels_are_flattened_on_host() -> bool:
    """Whether the host flattens the labels of sequences for a top-k accuracy."""
    specs = [tf.TensorSpec([64, 7, 10])] * 2
    return "Reshape" in probing.left_to_host(keras.metrics.top_k_categorical_accuracy, *specs)


REPAIRS = (
    Repair("signs-on-device", argmax_copies_to_host, find_signs_on_device),
    Repair("integers-on-device", integer_argmax_copies_to_host, find_largest_integers_on_device),
    Repair("comparisons-on-device", comparison_copies_to_host, compare_on_device),
    Repair("lookups-on-device", lookup_copies_to_host, look_up_on_device),
    Repair("padding-on-device", padding_runs_on_host, on_device.pad_on_device),
    Repair("ragged-rows-on-device", ragged_sum_copies_to_host, on_device.find_rows_on_device),
    Repair("sparse-lookups-on-device", sparse_lookup_counts_in_int32, on_device.look_up_sparse_on_device),
    Repair("top-k-on-device", labels_are_flattened_on_host, flatten_labels_on_device),
)
