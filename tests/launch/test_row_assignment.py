"""Which worker gets which rows: by hand, and as `fit` cuts batches."""

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tfgpu.core import batch_sharding
from tfgpu.launch.spark.frame import RowAssignment


def test_by_hand():
    assignment = RowAssignment(rows=13, global_batch=5, workers=2)
    # 3 and 2 rows of a whole batch, 2 and 1 of the last one
    assert assignment.batches == 3
    assert [assignment.piece(2, at) for at in range(2)] == [(10, 2), (12, 1)]
    assert [assignment.rows_of(rank) for rank in range(2)] == [8, 5]
    assert [assignment.rows_of(0, batches) for batches in range(4)] == [0, 3, 6, 8]


def test_devices_of_a_worker_take_turns_with_the_other_workers():
    assignment = RowAssignment(rows=8, global_batch=8, workers=2, devices=2)
    assert [assignment.pieces_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]


sizes = st.integers(1, 4)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.integers(1, 60), st.integers(1, 20), sizes, sizes)
def test_each_row_is_assigned_once(rows, global_batch, workers, devices):
    assignment = RowAssignment(rows, global_batch, workers, devices)
    seen = []
    for batch in range(assignment.batches):
        for at in range(assignment.replicas):
            first, count = assignment.piece(batch, at)
            seen += range(first, first + count)
    assert seen == list(range(rows))
    assert sum(assignment.rows_of(rank) for rank in range(workers)) == rows


def test_pieces_are_those_that_fit_cuts():
    for rows in range(1, 12):
        assignment = RowAssignment(rows, 11, 3)
        for at in range(3):
            piece = batch_sharding.replica_batch(tf.range(rows), at, 3)
            first, count = assignment.piece(0, at)
            assert int(piece.local) == count
            if count:
                np.testing.assert_array_equal(piece.data, range(first, first + count))
