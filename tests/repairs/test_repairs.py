"""Every repair installs once, can be switched off, and names a Keras that it does not fit.

`tests/doctor/test_software.py` asks whether each is still needed.
"""

import os
import subprocess
import sys

import pytest

from tfgpu import repairs


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
    parallel = keras.distribution.DataParallel(devices=["cpu:0"])
    with pytest.warns(UserWarning, match=r"keras.distribution does nothing .* DataParallel .* tfgpu.strategy\(\)"):
        keras.distribution.set_distribution(parallel)
    with pytest.warns(UserWarning, match="does nothing"), parallel.scope():
        pass
    keras.distribution.set_distribution(None)
