"""Several workers save without waiting for each other in the training; what fails on one is written on none."""

import pytest

from tfgpu.checkpoint import storage

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import json, os, pathlib, resource, sys, time
import keras, numpy as np
import tfgpu
from tfgpu.callbacks import Checkpoint

folder, rank = pathlib.Path(sys.argv[1]), json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"], check_replicas="off")  # which would wait before each save
x = np.ones((8, 4), "float32")

def until(path):
    while not path.exists():
        time.sleep(0.01)

def fit(epochs, *callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(400), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    said = None
    try:
        model.fit(x, x[:, :1], 8, epochs=epochs, verbose=0, callbacks=callbacks)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {"steps": int(model.optimizer.iterations), "said": said}

class Last(Checkpoint):
    # Worker 1 comes to each save when worker 0 has left it.
    def _save(self, callbacks, position, **options):
        if rank == 1:
            until(folder / f"left {position.name}")
        super()._save(callbacks, position, **options)
        if rank == 0:
            (folder / f"left {position.name}").touch()

class At(keras.callbacks.Callback):
    # Worker 1 does something in its third epoch.
    every_batch = False
    def __init__(self, act):
        super().__init__()
        self._act = act
    def on_epoch_end(self, epoch, logs=None):
        if rank == 1 and epoch == 2:
            self._act()

def allow(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

class Fails(keras.callbacks.Callback):
    # Worker 1 fails after its second step, which the first one saves.
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 1:
            raise RuntimeError("a callback of worker 1")

found = {"apart": fit(3, Last(folder / "apart"))}
found["cannot write"] = fit(50, Checkpoint(folder / "cannot write"), At(lambda: allow(1000)))
allow(resource.RLIM_INFINITY)
shared = tfgpu.checkpoint.Writer()
(folder / "file").write_text("in the way")
metrics = tfgpu.callbacks.MetricsFile(folder / "file" / "metrics.csv" if rank == 0 else None, writer=shared)
found["shared"] = fit(50, metrics, Checkpoint(folder / "shared", writer=shared))
x = np.ones((24, 4), "float32")
found["left"] = fit(1, Checkpoint(folder / "left", every_steps=1), Fails())
(folder / f"done {rank}").touch()
until(folder / f"done {1 - rank}")  # both are there all the time: neither finds that the other is gone
print(json.dumps(found))
"""


def test_workers_agree_on_a_save_while_they_train(together, tmp_path):
    found = together(SCRIPT, {"worker": 2}, tmp_path, timeout=550)
    chief, other = found["worker0"], found["worker1"]
    assert chief["apart"] == other["apart"] == {"steps": 3, "said": None}

    assert chief["cannot write"]["steps"] == other["cannot write"]["steps"] < 50
    assert "File too large" in chief["cannot write"]["said"] and "Writing " in chief["cannot write"]["said"]
    assert "File too large" in other["cannot write"]["said"]

    assert chief["shared"]["steps"] == other["shared"]["steps"] < 50
    assert "metrics.csv failed" in chief["shared"]["said"] and "failed on another worker" in other["shared"]["said"]

    assert other["left"]["said"] == "RuntimeError: a callback of worker 1"
    assert "a callback of worker 1" in chief["left"]["said"] and "Writing" not in chief["left"]["said"]

    for name, newest in (("apart", "epoch-0003"), ("cannot write", "epoch-0002"), ("left", "epoch-0000-step-0000001")):
        saved = storage.found(tmp_path / name)
        assert saved[0].name == newest
        assert {path.name for path in (tmp_path / name).iterdir()} == {path.name for path in saved}, name
        for path in saved:
            storage.read(path)
