"""Files appear whole, and of several workers only the chief writes them."""

import json
import os
import signal
import subprocess
import sys

import h5py
import keras
import numpy as np
import pytest

import tfgpu


class Fails(keras.layers.Layer):
    """Cannot be saved: the error comes when the file is half written."""

    def build(self, shape):
        self.w = self.add_weight(shape=(2,))

    def save_own_variables(self, store):
        store["0"] = self.w
        raise InterruptedError

    def call(self, x):
        return x


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, name):
    tfgpu.repair_keras()
    model = keras.Sequential([keras.Input((2,)), Fails()])
    path = tmp_path / name
    path.write_text("before")
    with pytest.raises(InterruptedError):
        model.save(path) if name.endswith(".keras") else model.save_weights(path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.weights.h5"])
def test_a_file_is_replaced_through_a_link(tmp_path, name):
    tfgpu.repair_keras()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / name, tmp_path / name
    target.write_text("before")
    link.symlink_to(target)
    model.save_weights(link) if "weights" in name else model.save(link)
    assert link.is_symlink()
    assert os.listdir(target.parent) == [name]
    model.load_weights(target)


def test_a_folder_in_the_way_is_the_error_that_keras_gives(tmp_path):
    tfgpu.repair_keras()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    (tmp_path / "m.keras").mkdir()
    with pytest.raises(IsADirectoryError):
        model.save(tmp_path / "m.keras")


KILLED = """
import os, signal, sys
import keras, numpy as np, tfgpu
tfgpu.repair_keras()

class Dies(keras.layers.Dense):
    saves = 0
    def save_own_variables(self, store):
        super().save_own_variables(store)
        Dies.saves += 1
        if Dies.saves == 3:
            os.kill(os.getpid(), signal.SIGKILL)

model = keras.Sequential([keras.Input((1,)), Dies(1)])
model.compile("sgd", "mse")
backup = keras.callbacks.BackupAndRestore(sys.argv[1], save_freq=1)
model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=2, callbacks=[backup], verbose=0)
"""


@pytest.mark.slow
def test_a_kill_in_the_third_backup_leaves_the_second(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=550)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    with h5py.File(tmp_path / "latest.weights.h5") as file:
        position = json.loads(file["tfgpu_position"].attrs["position"])
        assert {name: position[name] for name in ("epoch", "done", "first")} == {"epoch": 0, "done": 2, "first": 0}
        assert file["optimizer/vars/0"][()] == 2  # iterations
    assert json.loads((tmp_path / "training_metadata.json").read_text()) == {"epoch": 0, "batch": 1}


WORKER = """
import json, os, pathlib, sys
import numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, tfgpu
tfgpu.repair_keras()
folder = pathlib.Path(sys.argv[1])
folder.mkdir()

class Counts(keras.layers.Layer):
    def build(self, shape):
        options = {"synchronization": "on_read", "aggregation": "sum", "trainable": False}
        self.seen = keras.Variable(initializer="ones", shape=(), **options)
    def call(self, x):
        return x

class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            raise InterruptedError

def fit(name, *callbacks):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Counts(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    backup = keras.callbacks.BackupAndRestore(folder / name, save_freq=2)
    x = np.arange(8.0)[:, None]
    try:
        return model, model.fit(x, 2 * x, batch_size=2, epochs=2, shuffle=False, verbose=0,
                                callbacks=[backup, *callbacks]).history["loss"]
    except InterruptedError:
        return model, None

whole, losses = fit("whole")
whole.save(folder / "m.keras")
whole.save_weights(folder / "m.weights.h5")
fit("stopped", Stops())
left = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
resumed, rest = fit("stopped")
numbers = {"losses": losses, "rest": rest, "seen": float(resumed.layers[0].seen.numpy())}
weights = [[float(w.sum()) for w in m.layers[1].get_weights()] for m in (whole, resumed)]
print(json.dumps({"left": left, "weights": weights, **numbers}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_of_which_only_the_chief_has_a_disk_to_resume_from(together, tmp_path):
    found = together(WORKER, {"worker": 2}, tmp_path / "{task}")
    chief, other = found["worker0"], found["worker1"]
    backup = ["stopped", "stopped/latest.weights.h5", "stopped/training_metadata.json"]
    assert chief["left"] == ["m.keras", "m.weights.h5", *backup]
    assert other["left"] == []
    with h5py.File(tmp_path / "worker0" / "m.weights.h5") as file:
        assert file["layers/counts/vars/0"][()] == 2.0  # one on each worker: all took part in reading it
    for facts in found.values():
        assert facts["seen"] == 2.0
        assert facts["rest"] == pytest.approx(facts["losses"][1:], rel=1e-5)
        np.testing.assert_allclose(*facts["weights"], atol=1e-6)
    assert chief["weights"] == other["weights"]
