"""The cut is the best of all cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError
from tfgpu.parallel.balance import cut

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def highest(costs, cuts):
    ends = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


@given(COSTS, st.integers(1, 5), st.data())
def test_no_other_cut_is_cheaper(costs, parts, data):
    places = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 9), unique=True)))
    allowed = [at for at in range(1, len(costs)) if places is None or at in places]
    if parts - 1 > len(allowed):
        with pytest.raises(InputError, match=f"need {parts - 1} places to cut at; there are {len(allowed)}"):
            cut(costs, parts, places)
        return
    found = cut(costs, parts, places)
    assert len(found) == parts - 1 and found == sorted(set(found)) and set(found) <= set(allowed)
    assert highest(costs, found) == min(highest(costs, cuts) for cuts in itertools.combinations(allowed, parts - 1))
