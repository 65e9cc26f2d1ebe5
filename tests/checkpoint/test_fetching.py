"""If a checkpoint fails on one worker, it fails on all: none is left waiting in a collective."""

import pytest

SCRIPT = """
import json, pathlib, shutil, signal, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.callbacks import Checkpoint, Tasks

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])
folder, is_chief = pathlib.Path(sys.argv[1]), strategy.extended.should_checkpoint
x = np.ones((8, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Odd:
    def state(self):
        return object()

    def put(self, state, model):
        pass


class Breaks(keras.callbacks.Callback):
    '''Makes the running checkpoint unwritable on the chief; asks to leave then, where `leaves`.'''

    def __init__(self, path, leaves=False):
        super().__init__()
        self.path, self.leaves = path, leaves

    def on_epoch_begin(self, epoch, logs=None):
        if is_chief and self.path.is_dir():
            shutil.rmtree(self.path)
            self.path.write_text("a file stands where the directory was")
        if self.leaves:
            signal.raise_signal(signal.SIGTERM)


def fit(name, *others, epochs=2, **settings):
    model.fit(x, x, 4, epochs=epochs, verbose=0, callbacks=[Checkpoint(folder / name, **settings), *others])


def tasks():
    found = Tasks(folder / "tasks", remember={"odd": Odd()})
    found.begin(model)


said = {}
for name, act in {
    "state": lambda: fit("state", remember={"odd": Odd()}),
    "write": lambda: fit("write", Breaks(folder / "write"), epochs=3),
    "last write": lambda: fit("last", Breaks(folder / "last"), epochs=1),
    "leave": lambda: fit("leave", Breaks(folder / "leave", leaves=True)),
    "tasks": tasks,
}.items():
    try:
        act()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
    except SystemExit as error:
        said[name] = f"left: {error}"
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_what_fails_on_the_chief_fails_on_all_workers(together, tmp_path):
    answers = together(SCRIPT, {"worker": 2}, tmp_path, timeout=550)
    chief, other = answers["worker0"], answers["worker1"]
    unsaved = "InputError: The state of 'odd' contains a value of type `object`, which cannot be saved."
    assert chief["state"].startswith(unsaved) and chief["tasks"].startswith(unsaved)
    for name, doing in (("state", "Writing to"), ("tasks", "Saving to")):
        assert other[name].startswith(f"MachineError: {doing} "), other
        assert "failed on another worker. See that worker's error." in other[name]
    for name in ("write", "last write", "leave"):
        for said in (chief, other):  # both write there
            assert said[name].startswith("MachineError: Writing ") and "NotADirectoryError" in said[name], said
    assert other.keys() == chief.keys()
