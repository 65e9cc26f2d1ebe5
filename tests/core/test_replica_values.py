import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core.state import replica_values

VALUES = np.array([[1.0, 2.0], [3.0, 8.0]], "float32")


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sum", [4, 10]), ("mean", [2, 5]), ("none", [1, 2]), ("first", [1, 2])]
)
def test_aggregates(aggregation, expected):
    found = replica_values.aggregate(VALUES, aggregation)
    assert found.tolist() == expected and found.dtype == VALUES.dtype


def variable_on(replicas: int):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)])
    with strategy.scope():
        made = tf.Variable(
            [0.0, 0.0], synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    return strategy, made


@pytest.mark.parametrize(
    ("replicas", "aggregation", "expected"),
    [
        (2, "sum", [[1, 2], [3, 8]]),
        (3, "sum", [[4, 10], [0, 0], [0, 0]]),
        (3, "mean", [[2, 5], [2, 5], [2, 5]]),
    ],
)
def test_assigns_what_it_gathered_on_any_number_of_replicas(replicas, aggregation, expected):
    strategy, variable = variable_on(replicas)
    replica_values.assign(strategy, variable, VALUES, aggregation)
    assert replica_values.gather(strategy, variable).tolist() == expected


def test_bits_of_bfloat16_come_back():
    value = tf.constant([1.5, -2.0], tf.bfloat16).numpy()
    bits = replica_values.to_bits(value)
    assert bits.dtype == "uint16" and replica_values.from_bits(bits, value.dtype).tolist() == [1.5, -2.0]
