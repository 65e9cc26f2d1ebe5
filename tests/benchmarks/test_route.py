"""From `fit` to the weight update a step passes through at most a dozen files, in one direction."""

import itertools

import pytest

import tfgpu
from benchmarks import route

PASSES_ON = {"compat/patch.py", "core/randomness/rng.py"}
"""`wrap` itself, and the wrapper of `Strategy.run`, which tells a replica its rows and calls the given function."""


@pytest.fixture(scope="module")
def found():
    return route.follow(tfgpu.strategy(devices=["CPU:0", "CPU:1"]))


def test_at_most_a_dozen_files(found):
    assert found.stack[-1] == ("core/gradients.py", "backend_update_step")
    assert {"core/step_loop.py", "core/loop_builder.py"} < set(found.files)
    assert len(found.files) <= 12, found.files


def test_in_one_direction(found):
    visits = [file for file, _ in itertools.groupby(file for file, _ in found.stack if file not in PASSES_ON)]
    assert len(visits) == len(set(visits)), visits
