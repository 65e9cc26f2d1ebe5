"""Choices of Python code are made in the first trace of a step, and reused in all others."""

import itertools

from tfgpu.core.randomness import trace_choices


def test_the_first_trace_chooses_and_the_others_take_and_add():
    made, numbers = [], itertools.count()
    for _ in range(2):
        with trace_choices.shared(made):
            assert [trace_choices.choose(lambda: next(numbers)) for _ in range(2)] == [0, 1]
    with trace_choices.shared(made):
        assert [trace_choices.choose(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    assert trace_choices.choose(lambda: next(numbers)) == 3
