"""Ragged and sparse rows give the numbers of TensorFlow's own functions, and nothing of a batch's size leaves a GPU."""

import numpy as np
import pytest
import tensorflow as tf
import tracer

from tfgpu import repairs
from tfgpu.compat import targets

ROWS = 13
GPU = "CPU:1"  # stands for GPU:0


@pytest.fixture(autouse=True)
def repaired():
    repairs.repair_keras()


def on_gpu(function, *specs):
    """The function, compiled for a GPU."""

    def placed(*tensors):
        with tf.device(GPU):
            return function(*tensors)

    return tf.function(placed, autograph=False, input_signature=specs)


def to_host(function, *specs):
    """What of a batch's size the function copies from a GPU, where its arguments with values are, to the host."""
    traced = on_gpu(function, *specs).get_concrete_function()
    devices = {at: GPU for at, spec in enumerate(specs) if spec.dtype.is_floating}
    return [str(copy) for copy in tracer.facts_of(traced, devices, rows=ROWS).moved("to host", has_rows=True)]


VECTORS, ENDS = tf.TensorSpec([None, 3]), tf.TensorSpec([ROWS + 1], tf.int64)


def padded(vectors, ends, default=None, shape=None):
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        dense = tf.RaggedTensor.from_row_splits(vectors, ends, validate=False).to_tensor(default, shape=shape)
        factors = tf.reshape(tf.cast(tf.range(tf.size(dense)), dense.dtype), tf.shape(dense))
        loss = tf.reduce_sum(dense * factors)
    return dense, tf.convert_to_tensor(tape.gradient(loss, vectors))


def made(seed=0, most=5, dtype="float32"):
    lengths = np.random.default_rng(seed).integers(0, most, ROWS)
    values = np.random.default_rng(seed).normal(size=(lengths.sum(), 3))
    return tf.constant(values, dtype), tf.constant(np.cumsum([0, *lengths]))


HOWS = [{}, {"default": -2.0}, *({"shape": each} for each in ([None, 2, None], [ROWS, 9, 3]))]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("most", [5, 1], ids=["some", "none"])
def test_padded_vectors_and_their_gradient_are_tensorflows(how, most, dtype):
    vectors, ends = made(most=most, dtype=dtype)
    found = on_gpu(lambda v, e: padded(v, e, **how), tf.TensorSpec([None, 3], dtype), ENDS)(vectors, ends)
    for ours, theirs in zip(found, padded(vectors, ends, **how), strict=True):  # eagerly it is TensorFlow's own
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_rows_of_rows_are_padded_as_tensorflow_pads_them():
    values = tf.ragged.constant([[[1.0, 2.0], [3.0]], [], [[4.0]], [[5.0], [6.0, 7.0, 8.0]]])
    flat, *cuts = values.flat_values, *values.nested_row_splits

    def dense(flat):
        return tf.RaggedTensor.from_nested_row_splits(flat, cuts).to_tensor(9.0)

    np.testing.assert_array_equal(on_gpu(dense, tf.TensorSpec([None]))(flat), values.to_tensor(9.0))


@pytest.mark.parametrize("shape", [[None, None, 2], [None, 2]], ids=str)
def test_another_shape_of_the_vectors_is_tensorflows_error(shape):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        on_gpu(lambda v, e: padded(v, e, shape=shape), VECTORS, ENDS)(*made())


def test_a_default_or_a_shape_that_tensorflow_alone_knows_is_left_to_it():
    vectors, ends = made()

    def dense(vectors):
        rows = tf.RaggedTensor.from_row_splits(vectors, ends)
        return rows.to_tensor(np.array([1, 2, 3], "float32")), rows.to_tensor(shape=tf.constant([-1, 4, 3], tf.int64))

    for ours, theirs in zip(on_gpu(dense, VECTORS)(vectors), dense(vectors), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_padded_vectors_stay_on_the_gpu():
    assert to_host(padded, VECTORS, ENDS) == []


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("out_type", [None, tf.int32, tf.int64])
@pytest.mark.parametrize("splits", [[0, 3, 3, 5, 6, 9], [0], [0, 0, 0], [0, 4]], ids=str)
def test_rows_of_ragged_values_are_tensorflows(splits, out_type, dtype):
    ours = targets.owner("segment_id_ops").row_splits_to_segment_ids
    splits = tf.constant(splits, dtype)
    found, expected = ours(splits, out_type=out_type), ours.__wrapped__(splits, out_type=out_type)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == (out_type or dtype)


@pytest.mark.parametrize("reduce", [tf.reduce_sum, tf.reduce_mean, tf.reduce_max], ids=lambda each: each.__name__)
def test_sums_over_ragged_rows_stay_on_the_gpu(reduce):
    def reduced(vectors, ends):
        return reduce(tf.RaggedTensor.from_row_splits(vectors, ends, validate=False), 1)

    assert to_host(reduced, VECTORS, ENDS) == []


def looked_up(table, ids, weights, combiner="sum"):
    at = tf.constant([[0, 0], [1, 0], [1, 3], [4, 1]], tf.int64)
    sparse, scales = (tf.SparseTensor(at[: tf.shape(ids)[0]], each, [5, 4]) for each in (ids, weights))
    with tf.GradientTape() as tape:
        tape.watch(table)
        found = tf.nn.embedding_lookup_sparse(table, sparse, scales, combiner=combiner)
        loss = tf.reduce_sum(found**2)
    return found, tf.convert_to_tensor(tape.gradient(loss, table))


LOOKUP = tf.TensorSpec([6, 3]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([None])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_lookups_of_sparse_ids_are_tensorflows(combiner):
    table = tf.constant(np.random.default_rng(0).normal(size=(6, 3)), "float32")
    given = table, tf.constant([5, 2, 5, 0], tf.int64), tf.constant([0.5, 1.0, 2.0, -1.0])
    found = on_gpu(lambda *given: looked_up(*given, combiner=combiner), *LOOKUP)(*given)
    ours = tf.nn.embedding_lookup_sparse
    tf.nn.embedding_lookup_sparse = ours.__wrapped__
    try:
        expected = looked_up(*given, combiner=combiner)
    finally:
        tf.nn.embedding_lookup_sparse = ours
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_gradient_of_a_sparse_lookup_stays_on_the_gpu():
    assert to_host(looked_up, *LOOKUP) == []
