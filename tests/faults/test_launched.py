"""`tfgpu launch --max-restarts`: a worker that is killed in the middle changes nothing about the result."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """
import os, signal, sys
import keras, numpy as np, tfgpu

folder, dies = sys.argv[1:]
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(90, 6)).astype("float32"), rng.integers(0, 3, 90)
with tfgpu.strategy().scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), loss)
cluster = tfgpu.Cluster.from_environment()

class Dies(keras.callbacks.Callback):
    every_batch = False
    def on_epoch_end(self, epoch, logs=None):
        if (epoch, cluster.rank, os.environ["TFGPU_ATTEMPT"], dies) == (2, 1, "1", "dies"):
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [tfgpu.callbacks.Checkpoint(f"{folder}/checkpoints", every_steps=5), Dies()]
history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
if cluster.is_chief:
    np.savez(f"{folder}/end.npz", *model.get_weights(), loss=history.history["loss"])
"""


def launched(folder: Path, how: str) -> tuple[dict, str]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "tfgpu", "launch", "-n", "2", "--max-restarts", "2", "--no-logs"]
    done = subprocess.run(
        [*command, "--startup-timeout", "200", str(script), str(folder), how],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(np.load(folder / "end.npz")), done.stderr


def test_a_killed_worker_restarts_the_group_which_ends_with_the_same_bytes(tmp_path):
    whole, _ = launched(tmp_path / "whole", "lives")
    found, said = launched(tmp_path / "cut", "dies")
    assert "worker 1: " in said and "SIGKILL" in said
    assert "Attempt 2 starts" in said and len(whole["loss"]) == 4
    assert whole.keys() == found.keys()
    assert all(whole[name].tobytes() == found[name].tobytes() for name in whole)
