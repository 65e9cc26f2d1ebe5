"""Every repair installs once, can be switched off, and names a Keras that it does not fit.

`tests/doctor/test_software.py` asks whether each is still needed.
"""

import os
import subprocess
import sys

import pytest
from packaging.version import Version

from tfgpu import repairs
from tfgpu.compat import versions


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=550,
    )


def test_installing_twice_wraps_once():
    import keras

    names = repairs.repair_keras()
    wrapped = keras.optimizers.Optimizer.apply
    assert repairs.repair_keras() == names == tuple(fix.name for fix in repairs.all_repairs())
    assert keras.optimizers.Optimizer.apply is wrapped


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.13.2", {"old"}), ("3.14.1", {"old", "middle"}), ("3.15.1", {"middle", "new"}), ("3.16.0.dev1", {"new"})],
)
def test_a_repair_is_for_the_versions_that_have_its_fault(version, expected, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda library: Version(version))
    ranges = {"old": (None, "3.14"), "middle": ("3.14", "3.15"), "new": ("3.15", None), "none": ("3.17", None)}
    rows = {
        name: repairs.Repair(name, lambda: True, lambda: None, since=since, until=until)
        for name, (since, until) in ranges.items()
    }
    assert {name for name, repair in rows.items() if repair.is_for_this_keras()} == expected


@pytest.mark.parametrize("version", ["3.13.2", "3.14.1", "3.15.1", "3.16.0.dev2026102704"])
def test_versions_decide_which_repairs_are_applied(version, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda library: Version(version))
    names = {repair.name for repair in repairs.all_repairs.__wrapped__()}
    is_old, is_silent = version < "3.14", version >= "3.15"
    assert ("activity-sums" in names, "no-distribution" in names) == (is_old, is_silent)
    assert len(names) == 57 + is_old + is_silent


@pytest.mark.slow
def test_a_switch_leaves_keras_unchanged():
    code = (
        "import keras, tfgpu; before = keras.optimizers.Optimizer.apply; "
        "assert tfgpu.repair_keras() == (); tfgpu.strategy('one_device', devices=['CPU:0']); "
        "assert keras.optimizers.Optimizer.apply is before"
    )
    done = python("-c", code, TFGPU_REPAIR="0")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_keras_distribution_gives_a_warning():
    import keras

    repairs.repair_keras()
    try:
        parallel = keras.distribution.DataParallel(devices=["cpu:0"])
    except AttributeError as error:
        pytest.skip(f"this Keras makes no DataParallel on TensorFlow: {error}")
    with pytest.warns(UserWarning, match=r"keras.distribution does nothing .* DataParallel .* tfgpu.strategy\(\)"):
        keras.distribution.set_distribution(parallel)
    with pytest.warns(UserWarning, match="does nothing"), parallel.scope():
        pass
    keras.distribution.set_distribution(None)
