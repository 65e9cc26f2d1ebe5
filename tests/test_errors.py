"""The check of whole numbers."""

import numpy as np
import pytest

from tfgpu.errors import InputError, whole_number


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(7)])
def test_whole_numbers_become_plain_ones(value):
    found = whole_number("keep", value)
    assert found == value and type(found) is int


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 1.0, np.float32(2), "3", None, [1], float("nan")])
def test_all_else_is_refused(value):
    with pytest.raises(InputError, match="^`keep` must be a whole number from 1. Received: "):
        whole_number("keep", value)


def test_the_minimum_is_allowed_and_named():
    assert whole_number("limit", 0, minimum=0) == 0
    with pytest.raises(InputError, match="from 2. Received: 1."):
        whole_number("steps", 1, minimum=2)
