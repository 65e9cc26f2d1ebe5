"""Metrics counted in a closure do not touch their variables; the counts can be added in any order."""

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.parameter_server.exact_counts import MetricState, count_per_closure, counting


def count(metric, *batches):
    """What a closure has counted of a metric after these batches."""
    count_per_closure(type(metric))
    state = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
    with counting(MetricState(metric.variables, state)) as counted:
        for batch in batches:
            metric.update_state(*batch)
        return [np.asarray(v) for v in counted.values()], float(metric.result())


def test_the_parts_of_two_closures_make_one_device_s_metric():
    metric = keras.metrics.Mean()
    first, result = count(metric, ([1.0, 2.0],), ([6.0],))
    second, _ = count(metric, ([11.0],))
    assert [v.tolist() for v in first] == [9.0, 3.0] and result == 3.0
    assert [v.numpy().tolist() for v in metric.variables] == [0.0, 0.0]
    for variable, *parts in zip(metric.variables, first, second, strict=True):
        variable.assign_add(sum(parts))
    assert float(metric.result()) == 5.0


def test_metrics_that_assign_their_sums_are_counted_too():
    alone, apart = keras.metrics.AUC(num_thresholds=5), keras.metrics.AUC(num_thresholds=5)
    batches = [([0, 1], [0.2, 0.7]), ([1, 0], [0.4, 0.6]), ([1], [0.9])]
    for batch in batches:
        alone.update_state(*batch)
    parts = [count(apart, batch)[0] for batch in batches]
    for variable, *mine in zip(apart.variables, *parts, strict=True):
        variable.assign_add(sum(mine))
    assert float(apart.result()) == float(alone.result()) > 0


def test_off_the_servers_adding_is_keras_s():
    tfgpu.repair_keras()
    variable = keras.Variable(np.ones((2,)), dtype="float32")
    assert variable.assign_add(2.0).numpy().tolist() == [3.0, 3.0]
    assert variable.assign_sub([1.0, 0.0]).numpy().tolist() == [2.0, 3.0]
