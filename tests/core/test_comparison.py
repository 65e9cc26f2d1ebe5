"""Whether parts of a batch say what the whole says."""

import numpy as np
import pytest

from tfgpu.core.row_mixing.trials import comparison, isolation

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


@pytest.mark.parametrize(
    ("layer", "agree"),
    [
        (lambda x: 2 * x, True),
        (lambda x: np.repeat(x, 2, axis=0), True),  # by example
        (lambda x: np.concatenate([x, -x]), True),  # by block
        (lambda x: np.ones(5), True),  # no rows
        (lambda x: x - x.mean(0), False),
        (lambda x: x @ x.T, False),  # as wide as the batch
        (lambda x: x.sum(), False),
    ],
)
def test_outputs_by_rows(layer, agree):
    _, *places = isolation.shards_of(7)
    parts = [layer(each.of(X)) for each in places]
    assert comparison.are_rows(layer(X), parts, places, 1e-5) is agree


@pytest.mark.parametrize(
    ("part", "agree"),
    [([1.0, 2.0], True), ([1.0, 2.1], False), ([1.0, np.nan], False), ([1.0, np.inf], False), ([np.nan, 2.0], False)],
)
def test_what_is_no_number_is_not_close_to_one(part, agree):
    whole = np.array([1.0, 2.0])
    assert comparison.are_close([whole], [np.array(part)], [whole], 1e-5) is agree


@pytest.mark.parametrize("value", [[np.nan, np.inf, 1.0], [True, False], ["a"], [1, 2]])
def test_what_is_no_number_in_both_is_close(value):
    assert comparison.are_close([np.array(value)], [np.array(value)], [np.array(value)], 1e-5)
