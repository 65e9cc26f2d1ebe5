"""Top-k accuracies, whose labels are flattened as int32: TensorFlow's GPU kernel for that works in host memory."""

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


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


def labels_are_flattened_on_host() -> bool:
    """Whether the host flattens the labels of sequences for a top-k accuracy."""

    def accuracy(y_true, y_pred):
        return keras.metrics.top_k_categorical_accuracy(y_true, y_pred)

    return "Reshape" in probing.left_to_host(accuracy, tf.TensorSpec([64, 7, 10]), tf.TensorSpec([64, 7, 10]))


REPAIRS = (
    Repair(
        name="top-k-on-device",
        fault="on a GPU, a top-k accuracy of sequences copies all labels to the host",
        issue="",
        probe=labels_are_flattened_on_host,
        apply=flatten_labels_on_device,
    ),
)
