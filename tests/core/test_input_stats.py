"""How long a step computes, by tf.data's own statistics, between bounds that hold at any speed of the machine."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core import input_stats
from tfgpu.core.step_blocks import Block


def test_the_time_between_requests_excludes_the_wait_for_data():
    waited = []

    def load(number):
        began = time.perf_counter()
        time.sleep(0.03)
        waited.append(time.perf_counter() - began)
        return np.float32(number)

    data = tf.data.Dataset.range(12).map(lambda number: tf.numpy_function(load, [number], tf.float32))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # each request waits for its own batch
    iterator = iter(data.with_options(options))
    asked, got = [], []
    for _ in range(12):
        asked.append(time.perf_counter())
        next(iterator)
        got.append(time.perf_counter())
        time.sleep(0.005)
    found = input_stats.computing_s(SimpleNamespace(block=Block(iterator, 12)))
    computed = [then - before for before, then in zip(got[:-1], asked[1:], strict=True)]
    # From one request to the end of the next there is its wait, too.
    without_wait = [got[at + 1] - asked[at] - waited[at + 1] for at in range(11)]
    assert min(computed) <= found <= max(without_wait)


@pytest.mark.parametrize(("gaps", "mean"), [([0.1] * 4, None), ([0.1] * 9 + [5.0], 0.1), ([0.1, 0.3] * 5, 0.2)])
def test_pauses_do_not_count(gaps, mean):
    assert input_stats.mean_gap(gaps) == (mean if mean is None else pytest.approx(mean))


def test_what_is_no_iterator_of_this_machine_is_unknown():
    assert input_stats.computing_s(SimpleNamespace(block=None)) is None
    assert input_stats.computing_s(SimpleNamespace(block=Block(iter([1]), 1))) is None
