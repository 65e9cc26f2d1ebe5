"""From `fit` to the weight update a step passes through at most a dozen files, in one direction."""

import itertools
import json
import subprocess
import sys

import pytest

from benchmarks.children import ROOT
from benchmarks.route import Route

PASSES_ON = {"compat/patch.py", "core/randomness/rng.py"}
"""`wrap` itself, and the wrapper of `Strategy.run`, which tells a replica its rows and calls the given function."""


SCRIPT = """
import json, tfgpu
from benchmarks import route
tfgpu.environment.set_logical_devices(2)
print(json.dumps(route.follow(tfgpu.strategy(devices=["CPU:0", "CPU:1"])).stack))
"""


@pytest.fixture(scope="module")
def found():
    """In a process of its own: features that other tests have used wrap more functions."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return Route(tuple(map(tuple, json.loads(done.stdout))), ())


@pytest.mark.slow
def test_at_most_a_dozen_files(found):
    assert found.stack[-1] == ("core/gradients.py", "backend_update_step")
    assert {"core/step_loop.py", "core/loop_builder.py"} < set(found.files)
    assert len(found.files) <= 12, found.files


@pytest.mark.slow
def test_in_one_direction(found):
    visits = [file for file, _ in itertools.groupby(file for file, _ in found.stack if file not in PASSES_ON)]
    assert len(visits) == len(set(visits)), visits
