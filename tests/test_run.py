"""Unmodified scripts: TensorFlow's multi-worker tutorial, which stock Keras 3 crashes on, trains as it is printed."""

import json
import os
import subprocess
import sys

import pytest

TUTORIAL = """
import sys
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
tf.keras.utils.set_random_seed(0)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(0.1),
        metrics=["accuracy"],
    )
history = model.fit(data, epochs=2, steps_per_epoch=7, verbose=0)
print(sys.argv[1], __name__, history.history["loss"])
"""


def environ(**changes):
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", **changes}


@pytest.mark.processes
def test_the_multi_worker_tutorial_trains_as_printed(tmp_path, addresses):
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    workers = addresses(2)
    places = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
    command = [sys.executable, "-m", "tfgpu.run", "tutorial.py", "argument"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    processes = [
        subprocess.Popen(command, env=environ(TF_CONFIG=json.dumps(place)), **pipes) for place in (*places, {})
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    said = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert all(line.startswith("argument __main__ [") for line in said)
    losses = [json.loads(line.split("__main__ ")[1]) for line in said]
    assert losses[0] == losses[1] == pytest.approx(losses[2], abs=1e-5)  # the third had no peers


def test_the_command_hands_the_script_its_own_flags_and_its_exit_code(tmp_path):
    (tmp_path / "own.py").write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(3)\n")
    command = [sys.executable, "-m", "tfgpu", "run", "own.py", "--epochs", "3", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, env=environ())
    assert (done.returncode, done.stdout.strip()) == (3, "['own.py', '--epochs', '3', '--help'] __main__")
    missing = [sys.executable, "-m", "tfgpu", "run", "nothing.py"]
    done = subprocess.run(missing, capture_output=True, text=True, cwd=tmp_path, timeout=100, env=environ())
    assert done.returncode == 2 and "There is no script 'nothing.py'" in done.stderr


def test_a_missing_script_is_named(tmp_path):
    command = [sys.executable, "-m", "tfgpu.run", "nothing.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode != 0 and "There is no script 'nothing.py'" in done.stderr
