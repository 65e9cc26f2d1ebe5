"""`tfgpu doctor SCRIPT`: which pieces of a script's step are computed by rows."""

import json
import subprocess
import sys

import pytest

from tfgpu.cli import doctor as cli
from tfgpu.doctor import pieces
from tfgpu.doctor.facts import asking

SCRIPT = """
import sys, keras, numpy as np, tfgpu

class Centered(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

print(1 / (0 if "fail" in sys.argv else 1))
with tfgpu.strategy(unproven="refuse").scope():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Centered(name="centered")(inputs)))
    model.compile("sgd", "mse")
model.fit(np.ones((16, 5)), np.ones((16, 3)), batch_size=8, verbose=0)
raise RuntimeError("the script goes on after its first step")
"""


def doctor(folder, *words: str, environ) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tfgpu", "doctor", *words]
    environ = asking.with_tfgpu({**environ(), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""})
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_script_s_pieces(clean, tmp_path):
    shown = doctor(tmp_path, "train.py", environ=clean)
    assert shown.returncode == 0, shown.stderr
    assert "layer 'centered' (Centered)" in shown.stdout and "160 bytes a step" in shown.stdout
    done = doctor(tmp_path, "train.py", "--json", "--", "other", environ=clean)
    found = json.loads(done.stdout)
    (piece,) = found["pieces"]
    assert found["replicas"] == 2 and not found["error"]
    assert piece["verdict"] == "on all rows" and piece["source"] == "trial" and piece["bytes_a_row"] == 20


@pytest.mark.slow
def test_a_script_that_fails_is_a_problem(clean, tmp_path):
    done = doctor(tmp_path, "train.py", "fail", environ=clean)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_refused_piece_is_a_problem():
    refused = {"name": "layer", "verdict": "refused", "why": "", "source": "not tried", "traffic": "none"}
    assert pieces.Rehearsal((refused,), 0, "").failed
    assert not pieces.Rehearsal(({**refused, "verdict": "on all rows"},), 2, "").failed


def test_names_stay_whole_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    name = "layer 'normalization' (NormalizationOfManyWords)"
    piece = {"name": name, "verdict": "on all rows", "why": "", "source": "trial", "traffic": "128 bytes a step"}
    cli._show_pieces(pieces.Rehearsal((piece,), 2, ""))
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        name,
        "on all rows (trial); 128 bytes a step",
    ]


def test_wrong_input(clean, tmp_path):
    missing = doctor(tmp_path, "nowhere.py", environ=clean)
    assert missing.returncode == 2 and "There is no script 'nowhere.py'" in missing.stderr
    mixed = doctor(tmp_path, "train.py", "--fix", environ=clean)
    assert mixed.returncode == 2 and "takes only --json and --json-to" in " ".join(mixed.stderr.split())
