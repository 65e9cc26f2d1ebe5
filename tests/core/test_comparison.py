"""Whether parts of a batch say what the whole says."""

import numpy as np
import pytest

from tfgpu.core.row_mixing import comparison, isolation

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
