"""Rows, states and single numbers of parts beside those of the whole; `test_comparison.py` has the rest."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core.row_mixing.trials import comparison, isolation
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.state.trial_scope import Assigned

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


@pytest.mark.parametrize(
    ("layer", "agree"),
    [
        (lambda x: np.ones(14), True),  # alike in all parts, though as long as rows could be
        (lambda x: np.float32(3.0), True),
        (lambda x: x[:0], True),
        (lambda x: np.arange(len(x)), False),  # numbers its rows
        (lambda x: x[::-1], False),
    ],
)
def test_outputs_that_may_have_rows(layer, agree):
    _, *places = isolation.shards_of(7)
    parts = [layer(each.of(X)) for each in places]
    assert comparison.are_rows(np.asarray(layer(X)), [np.asarray(each) for each in parts], places, 1e-5) is agree


@pytest.mark.parametrize(
    ("one", "other", "besides", "expected"),
    [
        ([1.0, 100.0], [1.0009, 100.0], [], True),  # relative to the largest
        ([1.0, 100.0], [1.0011, 100.0], [], False),
        ([1.0, 1.0], [1.0009, 1.0], [], False),
        ([1.0, 1.0], [1.0009, 1.0], [[-100.0]], True),  # the difference of large numbers
        ([1.0, 1.0], [1.0009, 1.0], [[np.inf, 2.0]], False),  # what is not finite has no size
        ([np.nan, 1.0], [np.nan, 1.0], [], True),
        ([np.nan, 1.0], [2.0, 1.0], [], False),
        ([np.inf, 1.0], [np.inf, 1.0], [], True),
        ([np.inf, 1.0], [-np.inf, 1.0], [], False),
        ([0.0], [1e-9], [], True),
        ([0.01], [0.010001], [], False),  # small numbers are as close as large ones
        ([0.0], [3e-9], [], False),
        ([1.0], [1.0, 1.0], [], False),
        ([], [], [], True),
    ],
)
def test_what_is_close(one, other, besides, expected):
    besides = [np.array(each) for each in besides]
    assert comparison.is_close(np.array(one), np.array(other), 1e-5, *besides) is expected


def test_integers_are_close_if_they_are_equal():
    assert comparison.is_close(np.array([10**9, 1]), np.array([10**9, 1]), 1e-5)
    assert not comparison.is_close(np.array([10**9, 1]), np.array([10**9, 2]), 1e-5)


def state(aggregation="mean", synchronization="auto"):
    return types.SimpleNamespace(aggregation=aggregation, synchronization=synchronization)


def noted(**of):
    return types.SimpleNamespace(inside=of.get("inside", ()), added=of.get("added", ()))


def agrees(variable, whole, parts, *, start=1.0, dtype="float32", **of):
    of = {name: {id(variable)} for name in of}
    arrays = [np.asarray(each, dtype) for each in (start, whole, *parts)]
    return comparison.agrees(
        variable, arrays[0], arrays[1], arrays[2:], [0.25, 0.75], noted=noted(**of), close=comparison.CLOSE
    )


def test_a_state_agrees_where_parts_are_averaged_by_their_rows():
    assert agrees(state(), 5.0, [2.0, 6.0]) and not agrees(state(), 4.0, [2.0, 6.0])
    assert agrees(state(), 3.0, [3.0, 3.0])
    assert not agrees(state(), 5.0, [2.0, 6.0], dtype="int32") and agrees(state(), 2, [2, 2], dtype="int32")


@pytest.mark.parametrize("how", [{"synchronization": "on_read"}, {"aggregation": "only_first_replica"}])
def test_a_state_that_is_not_averaged_agrees_where_the_parts_are_alike(how):
    assert agrees(state(**how), 5.0, [2.0, 6.0]) is False and agrees(state(**how), 3.0, [3.0, 3.0])


def test_a_state_agrees_where_parts_are_summed():
    of_sum = state("sum")
    assert agrees(of_sum, 8.0, [2.0, 6.0]) and not agrees(of_sum, 7.0, [2.0, 6.0])
    assert agrees(of_sum, 7.0, [2.0, 6.0], added=True)  # what each has added to 1
    assert agrees(state("sum", "on_read"), 7.0, [2.0, 6.0])


def test_a_state_that_is_assigned_inside_agrees_where_all_parts_are_alike():
    assert not agrees(state(), 5.0, [2.0, 6.0], inside=True) and agrees(state(), 5.0, [5.0, 5.0], inside=True)
    assert not agrees(state("sum"), 8.0, [2.0, 6.0], inside=True)


def test_a_state_of_texts_is_not_compared():
    assert agrees(state(), "a", ["b", "c"], start="a", dtype="U1")


def test_layers_in_16_bits_are_compared_by_their_widest_step():
    close = comparison.close_for
    assert (close([]), close(["float32", None])) == (comparison.CLOSE, comparison.CLOSE)
    assert close(["float16"]) == 4e-3 and close(["float32", "float16", "bfloat16"]) == 3e-2


@pytest.mark.parametrize(
    ("shape", "expected"), [((14, 2), True), ((7,), True), ((8, 7), False), ((0, 2), False), ((), False)]
)
def test_what_has_rows(shape, expected):
    assert comparison.has_rows(np.zeros(shape), 7) is expected
    assert comparison.has_rows(np.zeros(1), 1)


def test_sizes_of_numbers():
    assert comparison.largest([np.array([1.0, -3.0]), None, np.zeros(0)]) == 3.0 and comparison.largest([None]) == 0.0
    assert comparison.weighed([np.array([1.0]), np.array([3.0])], [0.25, 0.75]) == [2.5]
    assert comparison.is_finite(np.array([1, 2])) and comparison.is_finite(np.array([1.0]))
    assert not comparison.is_finite(np.array([1.0, np.nan]))


def test_narrow_floats_become_numbers():
    for dtype in (tf.bfloat16, tf.float16, tf.float32):
        assert comparison.array(tf.constant([1.5], dtype)).dtype == "float32"
    assert comparison.array(tf.constant([1.5], tf.float64)).dtype == "float64"


def test_outputs_become_numbers_unless_they_hold_texts_or_ragged_rows():
    one, two = comparison.as_numbers({"a": tf.constant([1, 2]), "b": [3.0]})
    assert one.tolist() == [1.0, 2.0] and one.dtype == "float64" and two == 3.0
    for value in (tf.constant(["a"]), "a", tf.ragged.constant([[1], []]), tf.sparse.from_dense([1, 0])):
        with pytest.raises(comparison.NoNumbers, match="texts, ragged or sparse"):
            comparison.as_numbers([tf.constant(1), value])


@pytest.mark.parametrize(
    ("whole", "parts", "expected"),
    [
        ((7,), [(3,), (4,)], True),
        ((14, 2), [(6, 2), (8, 2)], True),
        ((7,), [(3,), (7,)], False),
        ((7,), [(3, 1), (4, 1)], False),
        ((), [(), ()], False),
    ],
)
def test_an_output_grows_with_its_rows(whole, parts, expected):
    assert comparison.grows_with_rows(np.zeros(whole), [np.zeros(each) for each in parts], [3, 4]) is expected


def test_rows_of_numbers_can_travel():
    numbers, texts = tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.string)
    assert comparison.can_travel((numbers, None)) and not comparison.can_travel((numbers, texts))
    assert not comparison.can_travel(tf.RaggedTensorSpec([None, None]))


@pytest.mark.parametrize(
    ("before", "after", "are"),
    [(0.0, 1.0, True), (0.0, np.nan, False), (np.nan, np.nan, True), (np.inf, np.inf, True), (0, 1, True)],
)
def test_a_variable_that_becomes_nan_hides_what_differs(before, after, are):
    found = Recorder(1.0, 0, 7)
    found.assigned["mean"] = Assigned("mean", "sum", np.array(before), np.array(after))
    assert comparison.are_numbers(found) is are
