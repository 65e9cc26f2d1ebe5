import pytest

from tfgpu.errors import InputError
from tfgpu.measure.rates import Rate, alternate, check


def test_the_median_and_the_spread_by_hand():
    rate = Rate((10.0, 8.0, 12.0))
    assert rate.median == 10 and rate.spread == pytest.approx(0.4)
    assert rate.facts() == {"median": 10.0, "lowest": 8.0, "highest": 12.0, "repeats": 3}


def test_rounds_alternate_direction():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    rates = alternate(runs, repeats=3)
    assert "".join(order) == "abccbaabc"
    assert rates["a"].values == (1, 6, 7) and list(rates) == ["a", "b", "c"]


@pytest.mark.parametrize("seconds, repeats", [(0, 3), (-1, 3), (float("nan"), 3), (float("inf"), 3), (1, 0)])
def test_an_empty_measurement_is_refused(seconds, repeats):
    with pytest.raises(InputError, match="above 0|`repeats` must be"):
        check(seconds, repeats)
