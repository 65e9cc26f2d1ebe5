"""Top-k accuracies of sequences: the numbers of stock Keras. `test_numpy.py` checks where they are computed."""

import keras
import numpy as np
import pytest

from tfgpu import repairs
from tfgpu.compat import targets

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(4, 7, 10)).astype("float32")
CLASSES = RANDOM.integers(0, 10, (4, 7))


@pytest.fixture(autouse=True)
def repaired():
    repairs.repair_keras()


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("rows", [(4, 7), (28,), (28, 1), (2, 2, 7)], ids=str)
def test_sparse_labels(rows, dtype):
    found = targets.owner("accuracy_metrics").sparse_top_k_categorical_accuracy
    labels, scores = CLASSES.reshape(rows).astype(dtype), SCORES.reshape(*rows[:-1], *rows[-1:], 10)
    if rows == (28, 1):
        scores = SCORES.reshape(28, 10)
    np.testing.assert_array_equal(found(labels, scores, k=3), found.__wrapped__(labels, scores, k=3))
    assert tuple(found(labels, scores, 3).shape) == rows


@pytest.mark.parametrize("rows", [(4, 7), (28,)], ids=str)
def test_one_hot_labels(rows):
    found = targets.owner("accuracy_metrics").top_k_categorical_accuracy
    labels, scores = np.eye(10, dtype="float32")[CLASSES].reshape(*rows, 10), SCORES.reshape(*rows, 10)
    np.testing.assert_array_equal(found(labels, scores, k=3), found.__wrapped__(labels, scores, k=3))


def test_sorted_class_numbers():
    order = np.argsort(-SCORES.reshape(28, 10), axis=-1)
    metric = keras.metrics.SparseTopKCategoricalAccuracy(3, from_sorted_ids=True)
    metric.update_state(CLASSES.reshape(28), order)
    expected = keras.metrics.SparseTopKCategoricalAccuracy(3)
    expected.update_state(CLASSES.reshape(28), SCORES.reshape(28, 10))
    assert float(metric.result()) == float(expected.result())
