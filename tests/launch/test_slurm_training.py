"""Trainings on a real Slurm that are killed, requeued, asked to leave: they end with an undisturbed one's weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import slurm_jobs
from slurm_jobs import ROOT, Run

pytestmark = [*slurm_jobs.MARKS]
cluster = slurm_jobs.cluster

TRAIN = """
import os, signal, sys, time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpu

folder, fault, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ.get("SLURM_PROCID", 0))
print("attempt", os.environ.get("TFGPU_ATTEMPT"), flush=True)


class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if fault == "die" and rank == 1 and epoch == 2 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        print("step", int(self.model.optimizer.iterations.numpy()), flush=True)
        time.sleep(0.5 if fault == "slow" else 0)


strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
checkpoint = tfgpu.callbacks.Checkpoint(folder / "checkpoints")
model.fit(x, x.sum(1), batch_size=16, epochs=4, verbose=0, callbacks=[checkpoint, Watch()])
np.savez(folder / f"weights-{rank}-of-{strategy.num_replicas_in_sync}.npz", *model.get_weights())
"""
TRAINING = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def train(folder: Path, fault: str = "none", **job) -> Run:
    """Submits a training of two tasks."""
    folder.mkdir(exist_ok=True)
    job = {"heartbeat_timeout_s": 120.0, **job}
    return Run(folder, folder, fault, script=TRAIN, light=False, environment=TRAINING, job=job)


def weights(folder: Path, name: str) -> list[np.ndarray]:
    with np.load(folder / f"weights-{name}.npz") as found:
        return [found[each] for each in found.files]


def check_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The weights of two undisturbed tasks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = train(folder)
    assert run.wait(500) == 0, (run.log(), run.task(0), run.task(1))
    check_same(weights(folder, "0-of-2"), weights(folder, "1-of-2"))
    return weights(folder, "0-of-2")


def test_two_tasks_train_and_a_death_changes_nothing(cluster, undisturbed, tmp_path):
    run = train(tmp_path, "die", max_restarts=1)
    assert run.wait(500) == 0, (run.log(), run.task(0), run.task(1))
    assert "task 1 ended first, with exit code 137" in run.log()
    assert re.findall(r"attempt (\d)", run.task(1)) == ["1", "2"]
    alone = [sys.executable, "-m", "tfgpu.run", "count it.py", tmp_path / "alone", "none"]
    (tmp_path / "alone").mkdir()
    environment = {**os.environ, **TRAINING, "PYTHONPATH": str(ROOT)}
    subprocess.run(alone, check=True, cwd=tmp_path, timeout=550, env=environment)
    for rank in range(2):
        check_same(weights(tmp_path, f"{rank}-of-2"), undisturbed)
    for one, mine in zip(weights(tmp_path / "alone", "0-of-1"), undisturbed, strict=True):
        np.testing.assert_allclose(one, mine, atol=1e-5)


@pytest.mark.parametrize("command", [["scontrol", "requeue"], ["scancel", "--signal=TERM"]])
def test_a_requeued_training_resumes_at_its_step(cluster, undisturbed, tmp_path, command):
    run = train(tmp_path, "slow")
    run.until(lambda: "step 6\n" in run.task(0))
    subprocess.run([*command, run.id], check=True)
    assert run.wait(500) == 0, (run.log(), run.task(0), run.task(1))
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")
    assert re.findall(r"attempt (\d)", run.task(0)) == ["1", "2"]
    steps = [int(each) for each in re.findall(r"^step (\d+)$", run.task(0), re.MULTILINE)]
    print(f"asked at step 6, left after step {run.task(0).partition('attempt 2')[0].count('step ')}")
    assert steps == list(range(1, 17))  # over both starts: none twice, none left out
    check_same(weights(tmp_path, "0-of-2"), undisturbed)
