"""`keras.ops` functions that a GPU computes itself give what stock Keras gives.

`tests/gpu_emulation/test_metrics_and_losses.py` asks where they are computed.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import repairs
from tfgpu.compat import targets


@pytest.fixture(autouse=True)
def repaired():
    repairs.repair_keras()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8", "bool"])
def test_signs_are_those_of_stock_keras(dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.5, -1.5], "float32")
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, "uint32").view("float32")
    values = tf.cast(np.concatenate([special, bits]), dtype)
    signbit = targets.owner("numpy").signbit
    np.testing.assert_array_equal(signbit(values), signbit.__wrapped__(values))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64", "bool", "float32"])
@pytest.mark.parametrize("how", [{"axis": -1}, {"axis": 2, "keepdims": True}, {"axis": 1}, {}], ids=str)
def test_the_largest_is_that_of_stock_keras(dtype, how):
    argmax = targets.owner("numpy").argmax
    values = tf.cast(np.random.default_rng(0).integers(0, 4, (5, 6, 7)), dtype)
    found, expected = argmax(values, **how), argmax.__wrapped__(values, **how)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype == tf.int32


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
@pytest.mark.parametrize("other", [3, np.int64(3), 2.5, True, np.array([[3, 4, 2**31 - 1]], "int32"), 2**40])
def test_comparisons_are_those_of_stock_keras(name, other):
    compare = getattr(targets.owner("numpy"), name)
    values = tf.constant([[3, -4, 2**31 - 1], [0, 4, -(2**31)]])
    try:
        expected = compare.__wrapped__(values, other)
    except Exception as error:
        with pytest.raises(type(error)):
            compare(values, other)
        return
    np.testing.assert_array_equal(compare(values, other), expected)


@pytest.mark.parametrize("how", [{"axis": 0}, {"axis": 1}, {}], ids=str)
@pytest.mark.parametrize("indices", [[[0, 4], [-1, 2]], [3], 2], ids=str)
def test_rows_are_those_of_stock_keras(indices, how):
    take, table = targets.owner("numpy").take, tf.reshape(tf.range(25.0), (5, 5))
    found, expected = take(table, tf.constant(indices), **how), take.__wrapped__(table, tf.constant(indices), **how)
    np.testing.assert_array_equal(found, expected)


def test_a_size_is_compared_on_the_host():
    def grows(x):
        return keras.ops.greater(tf.shape(x)[0], 3)

    graph = tf.function(grows).get_concrete_function(tf.TensorSpec([None])).graph
    assert [each.inputs[0].dtype for each in graph.get_operations() if each.type == "Greater"] == [tf.int32]
