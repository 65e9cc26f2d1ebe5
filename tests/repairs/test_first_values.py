"""Initial values of variables on several workers are the chief's, in any dtype."""

import pytest
import tensorflow as tf

from tfgpu.repairs import strategies


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [("bfloat16", "float32"), ("int8", "int64"), ("uint8", "int64"), ("float32", "float32"), ("bool", "bool")],
)
def test_a_value_is_sent_in_a_dtype_that_holds_it(dtype, sent):
    assert strategies._sent_as(tf.as_dtype(dtype)) == sent


SCRIPT = """
import json
import tensorflow as tf
import tfgpu
strategy = tfgpu.strategy("multi_worker")
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    made = [tf.Variable(tf.cast([2 + rank, 100 - rank], dtype)) for dtype in ("bfloat16", "int8", "float32", "int64")]
print(json.dumps([[each.dtype.name, *map(float, each.numpy())] for each in made]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_all_workers_have_the_chiefs_values(together):
    expected = [[dtype, 2.0, 100.0] for dtype in ("bfloat16", "int8", "float32", "int64")]
    assert list(together(SCRIPT, {"worker": 2}).values()) == [expected, expected]
