import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import environment
from tfgpu.errors import InputError, MachineError


def fresh(code: str) -> list[str]:
    """Runs `code` in a process whose TensorFlow has not started its devices; returns the lines it prints."""
    start = "import tensorflow as tf\nfrom tfgpu import environment\nfrom tfgpu.errors import *\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_setters_take_effect_and_none_of_them_starts_the_devices():
    lines = fresh("""
print(environment.is_initialized(), [d.name for d in environment.devices()])
environment.set_logical_devices(3)
environment.set_visible_devices(0)
environment.set_seed(7)
print([d.name for d in environment.devices("CPU")], [d.physical for d in environment.devices("CPU")])
print(environment.is_initialized())
print([d.name for d in tf.config.list_logical_devices()])
print(environment.is_initialized())
""")
    assert lines == [
        "False ['CPU:0']",
        "['CPU:0', 'CPU:1', 'CPU:2'] ['CPU:0', 'CPU:0', 'CPU:0']",
        "False",
        "['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']",
        "True",
    ]


def test_the_memory_setters_need_a_gpu_and_say_so():
    for setter in (environment.set_memory_growth, lambda: environment.set_memory_limit(2**30)):
        with pytest.raises(MachineError, match="found no GPU.*tfgpu doctor"):
            setter()
    with pytest.raises(MachineError, match="no visible GPU to split"):
        environment.set_logical_devices(2, "GPU", memory_bytes=2**30)


@pytest.mark.parametrize(
    "setter",
    [
        lambda: environment.set_logical_devices(7),
        lambda: environment.set_visible_devices([], kind="CPU"),
    ],
    ids=["logical", "visible"],
)
def test_too_late_is_an_error_that_names_the_fix(setter):
    tf.constant(0)
    before = environment.devices()
    with pytest.raises(MachineError, match="comes too late.*before the first strategy"):
        setter()
    assert environment.devices() == before


def test_devices_are_facts_in_tensorflows_order():
    names = [device.name for device in environment.devices()]
    assert names == [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    assert environment.devices("CPU")[0] == environment.Device("CPU:0", "CPU", "CPU:0")
    assert environment.is_initialized()
    with pytest.raises(InputError, match="Unknown device kind 'gpu'. Did you mean|Unknown device kind 'gpu'"):
        environment.devices("gpu")


@pytest.mark.parametrize(
    ("setter", "words"),
    [
        (lambda: environment.set_logical_devices(0), "`count` must be a whole number of at least 1"),
        (lambda: environment.set_logical_devices(2.0), "`count` must be a whole number"),
        (lambda: environment.set_logical_devices(2, memory_bytes=2**30), "applies to GPUs"),
        (lambda: environment.set_logical_devices(2, "GPU"), "need `memory_bytes`"),
        (lambda: environment.set_logical_devices(2, "TPU"), "Unknown device kind 'TPU'"),
        (lambda: environment.set_memory_limit(1000), "of at least 1048576"),
        (lambda: environment.set_visible_devices(3), "this machine has 0 GPU"),
        (lambda: environment.set_visible_devices(-1), "`chosen` must be"),
        (lambda: environment.set_visible_devices(1.0), "`chosen` must be"),
        (lambda: environment.set_visible_devices([0, 0], kind="CPU"), "each once"),
        (lambda: environment.set_seed(-1), "`seed` must be"),
        (lambda: environment.set_seed(2**32), "below 2..32"),
        (lambda: environment.set_seed(True), "`seed` must be"),
    ],
)
def test_bad_input_is_refused(setter, words):
    with pytest.raises(InputError, match=words):
        setter()


def draws():
    return [
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform([])),
        float(keras.random.uniform(())),
        keras.layers.Dense(1, kernel_initializer="glorot_uniform").compute_output_shape((1, 2)),
        float(keras.initializers.GlorotUniform()((1, 1))[0, 0]),
    ]


def test_a_seed_repeats_every_random_source():
    environment.set_seed(3, deterministic=False)
    first = draws()
    environment.set_seed(3, deterministic=False)
    assert draws() == first
    environment.set_seed(4, deterministic=False)
    assert draws() != first


@pytest.mark.slow
def test_determinism_is_asked_for():
    # An op that cannot repeat refuses to run: that is how TensorFlow shows that the switch is on.
    lines = fresh("""
import keras
environment.set_seed(3)
print(float(tf.random.uniform([])) == (environment.set_seed(3), float(tf.random.uniform([])))[1])
try:
    tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32)
except (RuntimeError, tf.errors.InvalidArgumentError) as error:
    print("refused")
""")
    assert lines == ["True", "refused"]
