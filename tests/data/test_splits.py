import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.data.splits import copies, split
from tfgpu.errors import InputError


def test_a_balanced_set_is_cut_by_hand_counted_numbers():
    labels = np.array([0, 1] * 10)  # ten each: 2 of each class in validation and in test, 6 of each left
    parts = split(labels, validation=0.2, test=0.2, seed=3)
    for name, each in (("train", 6), ("validation", 2), ("test", 2)):
        assert np.bincount(labels[parts[name]]).tolist() == [each, each]


def test_rounding_is_carried_from_class_to_class():
    # 10 classes of 13: a tenth is 1.3 each, 13 together; rounding each alone would give 10.
    parts = split(np.repeat(np.arange(10), 13), validation=0.0, test=0.1)
    assert len(parts["test"]) == 13
    assert len(parts["validation"]) == 0


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=120),
    seed=st.integers(0, 2**40),
    validation=st.sampled_from([0.0, 0.1, 0.3]),
    test=st.sampled_from([0.0, 0.2, 0.4]),
    copied=st.booleans(),
)
def test_parts_are_disjoint_whole_repeatable_and_hold_every_class(labels, seed, validation, test, copied):
    labels = np.array(labels)
    groups = np.arange(len(labels)) // 2 if copied else np.arange(len(labels))
    try:
        parts = split(labels, validation=validation, test=test, seed=seed, groups=groups)
    except InputError:
        assert copied or len(labels) < 15 or np.bincount(labels).max() < 10
        return
    again = split(labels, validation=validation, test=test, seed=seed, groups=groups)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    sides = {name: set(groups[indices].tolist()) for name, indices in parts.items()}
    assert (
        not sides["train"] & sides["validation"] | sides["train"] & sides["test"] | sides["validation"] & sides["test"]
    )
    if not copied:
        asked = 1 + (validation > 0) + (test > 0)
        for name, fraction in (("train", 1), ("validation", validation), ("test", test)):
            if fraction:
                present = set(labels[parts[name]].tolist())
                assert {c for c in range(5) if (labels == c).sum() > asked} <= present


def test_another_seed_gives_another_split():
    labels = np.arange(200) % 4
    one, two = (split(labels, validation=0.1, test=0.2, seed=s)["test"] for s in (0, 1))
    assert one.tolist() != two.tolist()


def test_copies_stay_on_one_side():
    array = np.arange(40).reshape(20, 2)[np.arange(60) % 20]
    groups = copies(array)
    assert groups.tolist() == list(range(20)) * 3
    parts = split(np.arange(60) % 2, validation=0.2, test=0.2, groups=groups)
    rows = [{tuple(r) for r in array[indices].tolist()} for indices in parts.values()]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]


@pytest.mark.parametrize("fractions", [(-0.1, 0.1), (1.0, 0.0), (0.5, 0.5), ("a", 0.1), (True, 0.1), (float("nan"), 0)])
def test_impossible_fractions_are_named(fractions):
    with pytest.raises(InputError, match="validation"):
        split(np.zeros(10, int), validation=fractions[0], test=fractions[1])


def test_too_few_examples_are_an_error_that_counts_them():
    with pytest.raises(InputError, match="2 examples are too few .* Add examples"):
        split(np.array([0, 1]), validation=0.1, test=0.2)
