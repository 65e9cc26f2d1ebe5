"""The checks of numbers."""

import numpy as np
import pytest

from tfgpu.errors import InputError, is_number, positive, whole_number


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(7)])
def test_whole_numbers_become_plain_ones(value):
    found = whole_number("keep", value)
    assert found == value and type(found) is int


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 1.0, np.float32(2), "3", None, [1], float("nan")])
def test_all_else_is_refused(value):
    with pytest.raises(InputError, match="^`keep` must be a whole number of at least 1. Received: "):
        whole_number("keep", value)


def test_the_minimum_is_allowed_and_named():
    assert whole_number("limit", 0, minimum=0) == 0
    with pytest.raises(InputError, match="of at least 2. Received: 1."):
        whole_number("steps", 1, minimum=2)


def test_the_maximum_is_allowed_and_named():
    assert whole_number("shards", 9, maximum=9) == 9
    with pytest.raises(InputError, match="from 1 to 9. Received: 10."):
        whole_number("shards", 10, maximum=9)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), np.int64(3), 10**400, float("inf")])
def test_numbers_above_0(value):
    assert positive("timeout_s", value) is value


@pytest.mark.parametrize("value", [0, -1, True, np.True_, "3", None, [1], float("nan"), 1j])
def test_all_but_numbers_above_0_is_refused(value):
    with pytest.raises(InputError, match="^`timeout_s` must be above 0. Received: "):
        positive("timeout_s", value)


@pytest.mark.parametrize("value", [0, -1.5, np.float32(2), np.int64(3), 10**400])
def test_finite_numbers(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, [1], float("nan"), float("-inf"), 1j])
def test_everything_else_is_not_a_finite_number(value):
    assert not is_number(value)
