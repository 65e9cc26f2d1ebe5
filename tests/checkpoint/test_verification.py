"""`tfgpu compare weights`: the first checkpoint and the first variable at which two runs part."""

import json

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.checkpoint import storage, verification
from tfgpu.checkpoint.storage import Position
from tfgpu.cli import _execute
from tfgpu.core.state import parts
from tfgpu.errors import InputError

ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")


def write(folder, *places, **changed):
    """Checkpoints with two arrays; `changed` maps a checkpoint's name to another value of the second."""
    for epoch, step, done in places:
        position = Position(epoch, step=step, done=done)
        kernel = np.array([1.0, 2.0, changed.get(position.name.replace("-", "_"), 3.0)], "float32")
        arrays = {"weights/0001": kernel, "optimizer/0000": np.array(epoch)}
        memory = {"paths": {"weights/0001": "dense/kernel"}}
        storage.write(folder / position.name, position, parts.whole(arrays), memory)
    return folder


def test_the_first_checkpoint_and_variable_are_named(tmp_path, capsys):
    places = (1, 0, 0), (1, 15, 5), (2, 0, 0)
    one = write(tmp_path / "one", *places)
    other = write(tmp_path / "run" / "checkpoints", *places, (3, 0, 0), epoch_0001_step_0000015=3.5, epoch_0002=4.0)
    found = verification.verify(one, tmp_path / "run")
    assert found.compared == ("epoch-0001", "epoch-0001-step-0000015", "epoch-0002")
    assert found.only_one == ("epoch-0003",) and found.arrays == 4
    assert found.parting.where == "epoch-0001-step-0000015"
    assert found.parting.variable == "weights/0001 (dense/kernel)"
    assert found.parting.reason == "1 of 3 numbers differ, the first at (2,): 3.0 and 3.5"
    assert verification.verify(one, other, rtol=0.2).parting.where == "epoch-0002"
    assert verification.verify(one, other, atol=1.0).parting is None
    assert _execute(["compare", "weights", str(one), str(tmp_path / "run")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "The first difference is in epoch-0001-step-0000015, weights/0001 (dense/kernel): 1 of 3 numbers differ, the "
        "first at (2,): 3.0 and 3.5.",
        "Only one of them has epoch-0003.",
    ]
    assert _execute(["compare", "weights", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "Equal bit by bit: 6 arrays in 3 checkpoints.\n"
    assert _execute(["compare", "weights", str(one / "epoch-0001"), str(other / "epoch-0001"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parting"] is None


def test_bits_differ_where_numbers_do_not(tmp_path):
    one = write(tmp_path / "one", (1, 0, 0), epoch_0001=0.0)
    other = write(tmp_path / "other", (1, 0, 0), epoch_0001=-0.0)
    assert verification.verify(one, other).parting.reason == "1 of 3 numbers differ, the first at (2,): 0.0 and -0.0"
    nan = write(tmp_path / "nan", (1, 0, 0), epoch_0001=np.nan)
    assert verification.verify(nan, nan).parting is None
    assert verification.verify(nan, other, atol=9.0).parting is not None


def test_a_runs_checkpoints_and_files_of_keras(tmp_path):
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="last")])
        model.compile("adam", "mse")
    model.fit(ROWS, ROWS[:, :2], epochs=1, verbose=0, callbacks=[tfgpu.callbacks.Checkpoint(tmp_path / "run")])
    memory = storage.read(tmp_path / "run" / "epoch-0001").memory
    assert memory["paths"]["weights/0000"].endswith("last/kernel")
    files = [tmp_path / "one.keras", tmp_path / "two.keras", tmp_path / "three.weights.h5", tmp_path / "4.weights.h5"]
    model.save(files[0])
    model.save_weights(files[2])
    model.layers[-1].bias.assign([0.0, 9.0])
    model.save(files[1])
    model.save_weights(files[3])
    for pair in (files[:2], files[2:]):
        found = verification.verify(*pair)
        assert found.parting.variable == "layers/dense/vars/1" and found.parting.where is None
        assert "2 of 2 numbers differ, the first at (0,)" in found.parting.reason
        assert verification.verify(pair[0], pair[0]).parting is None


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    one, other = write(tmp_path / "one", (1, 0, 0)), write(tmp_path / "other", (2, 0, 0))
    (tmp_path / "no.keras").write_bytes(b"no archive")
    for pair, words in {
        (one, other): "no checkpoint of the same name",
        (one, tmp_path): "has no checkpoints",
        (one, tmp_path / "no.keras"): "Compare two of the same kind",
        (tmp_path / "no.keras", tmp_path / "no.keras"): "cannot be read",
    }.items():
        with pytest.raises(InputError, match=words):
            verification.verify(*pair)
        assert _execute(["compare", "weights", *map(str, pair)]) == 2
    (one / "epoch-0001" / storage.STATE).write_bytes(b"other")
    with pytest.raises(InputError, match="is damaged"):
        verification.verify(one, one)
    with pytest.raises(InputError, match="`rtol` must be a number of at least 0"):
        verification.verify(one, one, rtol=-1.0)
    assert "error: " in capsys.readouterr().err
