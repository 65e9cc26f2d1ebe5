"""Copies in host memory: one call reads all variables, and later steps do not change the copies."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import strategies
from tfgpu.compat import slots
from tfgpu.compat.variables import local_copy
from tfgpu.core.state import host_copies


@pytest.fixture
def model():
    with strategies.mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def test_all_variables_are_read_by_one_function_that_is_kept(model):
    variables = [*model.variables, *model.optimizer.variables]
    found = host_copies.copy(model, variables)
    for value, variable in zip(found, variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())
        assert value.dtype == variable.numpy().dtype
    (reader,) = slots.get(model, "readers")
    assert len(reader.variables) == len(variables)
    for _ in range(2):
        host_copies.copy(model, variables)
        host_copies.copy(model, variables[:2])
    assert len(slots.get(model, "readers")) == 2 and slots.get(model, "readers")[1] is reader
    assert reader.read.experimental_get_tracing_count() == 1
    host_copies.copy(model, variables[1:])
    assert reader not in slots.get(model, "readers")


@pytest.mark.parametrize("stretch", [(0, 6), (2, 5), (3, 3)])
def test_stretches_are_copied_alone(model, stretch):
    kernel = model.layers[0].kernel
    (found,) = host_copies.copy(model, [kernel], stretches=[stretch])
    expected = kernel.numpy().reshape(-1)[stretch[0] : stretch[1]]
    np.testing.assert_array_equal(found.reshape(-1), expected)
    assert found.base is None or found.base.nbytes == found.nbytes  # no more is held
    before = found.copy()
    kernel.assign_add(np.ones((3, 2)))
    np.testing.assert_array_equal(found, before)


def test_each_value_is_read_where_it_is_and_put_on_the_host(model):
    host_copies.copy(model, model.variables)
    graph = slots.get(model, "readers")[0].read.get_concrete_function().graph
    (copied,) = {output.op.inputs[0].op.name for output in graph.outputs}
    copied = graph.get_operation_by_name(copied)
    assert "CPU:0" in copied.device and [each.op.type for each in copied.inputs] == ["ReadVariableOp"] * 4
    read = {id(outer): inner for outer, inner in graph.captures}
    handles = [read[id(local_copy(variable).handle)] for variable in model.variables]
    assert [each.op.inputs[0] is handle for each, handle in zip(copied.inputs, handles, strict=True)] == [True] * 4


def test_a_step_does_not_change_what_was_read(model):
    (before,) = host_copies.copy(model, model.trainable_variables[:1])
    expected = before.copy()
    model.fit(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"), verbose=0)
    np.testing.assert_array_equal(before, expected)
    assert (model.trainable_variables[0].numpy() != expected).any()


def test_other_variables_read_themselves(model):
    class Held(keras.Variable):
        def numpy(self):
            return np.array([5.0])

    with tf.device("CPU:0"):
        variables = [Held(1.0), keras.Variable(np.ones(2), dtype="bfloat16"), keras.Variable(3)]
    found = host_copies.copy(model, variables)
    assert [value.tolist() for value in found] == [[5.0], [1.0, 1.0], 3]
    assert found[1].dtype == ml_dtypes.bfloat16
