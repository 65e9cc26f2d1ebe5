"""`tfgpu tune batch-size` and `learning-rate`: its output, its files, and invalid input."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from tfgpu import cli
from tfgpu.cli import tune as command
from tfgpu.recipes import recipe as recipes
from tfgpu.tune.batch_search import BatchSizes
from tfgpu.tune.batches import BatchTry
from tfgpu.tune.range_test import judged

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "mlp", "--model-option", "widths=[16]"]


def tfgpu(*words, cwd, timeout=550):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "dumb"}
    environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # As users have it.
    command = [sys.executable, "-m", "tfgpu", "tune", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["batch-size", "digist"], "Did you mean 'digits'?"),
        (["batch-size", "--lowest", "0"], "--lowest must be a whole number of at least 1. Received: 0."),
        (["batch-size", "--lowest", "two"], "Invalid value for '--lowest'"),
        (["batch-size", "--scale", "sqr"], "Did you mean 'sqrt'?"),
        (["batch-size", "--device-memory", "much"], "A size of memory is a number with a unit"),
        (["batch-size", "--timeout", "-1"], "--timeout must be above 0. Received: -1.0."),
        (["batch-size", "--output", "full"], "--output must be a new or empty folder. Received: 'full'."),
        (["learning-rate", "--output", "full"], "--output must be a new or empty folder. Received: 'full'."),
        (["learning-rate", "--epochs", "0"], "`epochs` should be greater than or equal to 1"),
        (["batch-size", "stranger.yaml"], "stranger.yaml names code to run: model: os:system"),
        (["learning-rate", "stranger.yaml"], "stranger.yaml names code to run: model: os:system"),
        (["batchsize"], "Unknown recipe 'batchsize'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    (tmp_path / "stranger.yaml").write_text("model: os:system\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *words])
    assert ended.value.code == 2 and expected in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "stranger.yaml"]


def test_the_table_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    tries = [
        BatchTry(
            8192, True, 123456.7, (119000.2, 1234567.8), 0.0663, {"host_peak_bytes": 9, "gpu0_peak_bytes": 71 << 30}
        ),
        BatchTry(
            16384, True, 123456.7, (119000.2, 1234567.8), 12.7, {"host_peak_bytes": 9, "gpu0_peak_bytes": 75 << 30}
        ),
        BatchTry(32768, False, reason="Out of memory for a tensor of shape [32768, 1024], on GPU:0."),
    ]
    settings = {"global_batch": 16384, "learning_rate": 0.0042, "warmup_epochs": 5.0}
    found = BatchSizes(
        tuple(tries), 16384, 16384, settings, recipes.make(settings), 8, 10**6, "NVIDIA H100", ("A note.",)
    )
    console = Console(width=80, highlight=False)
    command._show_batches(console, found)
    command._show_settings(console, found.settings, Path("found"))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    row = next(line for line in lines if line.startswith("16,384"))
    assert row.split() == ["16,384", "123,457", "119,000-1,234,568", "12.7", "s", "80.5", "GB", "fastest,", "largest"]
    assert "GPU peak" in "\n".join(lines) and "8 replicas, NVIDIA H100" in lines[0]
    assert "Settings: --batch 16384 --learning-rate 0.0042 --warmup-epochs 5" in lines


def test_rates_have_three_digits_wherever_they_are_shown(capsys):
    """Three digits in the table, the reason, the chart and the recipe; callers get all digits."""
    rates = np.geomspace(1e-6, 1, 200).tolist()
    losses = [1.0 if rate < 1.2e-4 else max(0.2, 1 - 0.4 * math.log10(rate / 1.2e-4)) for rate in rates]
    tested = judged(rates, [max(loss, 3 * rate) for rate, loss in zip(rates, losses, strict=True)], complete=True)
    command._show_rates(Console(width=80, highlight=False), tested)
    out = capsys.readouterr().out
    row = {line.split(maxsplit=2)[2].strip(): line.split()[0] for line in out.splitlines() if len(line.split()) > 2}
    three = f"{tested.suggestion:.3g}"
    assert row["suggestion"] == three and float(three) != tested.suggestion
    labels = [text.get_text() for text in tested.plot().axes[0].get_legend().get_texts()]
    assert f"suggestion {three}" in labels and f"lowest loss {tested.lowest:.3g}" in labels
    assert row["lowest loss"] == f"{tested.lowest:.3g}" and f"lowest at {tested.lowest:.3g}." in tested.reason
    shown = [line.split()[0] for line in out.splitlines() if line.strip()[:1].isdigit() and "steps" not in line]
    assert len(shown) > 10 and all(text == f"{float(text):.3g}" for text in shown)


@pytest.mark.slow
def test_a_batch_size_is_found_and_its_recipe_trains(tmp_path):
    words = ["batch-size", "digits", *SMALL, "--epochs", 8, "--lowest", 200, "--highest", 400, "--repeats", 1]
    done = tfgpu(*words, "--output", "a/found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "TensorFlow" not in done.stderr and "WARNING" not in done.stderr, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    folder = tmp_path / "a/found"
    assert sorted(path.name for path in folder.iterdir()) == ["recipe.yaml", "result.json"]
    result, made = (
        json.loads((folder / "result.json").read_text()),
        yaml.safe_load((folder / "recipe.yaml").read_text()),
    )
    assert [one["batch"] for one in result["tries"]] == [200, 400]
    assert {name: made[name] for name in result["settings"]} == result["settings"]
    assert made["warmup_epochs"] == 2.0 and made["model_options"] == {"widths": [16]}
    train = [sys.executable, "-m", "tfgpu", "train", folder / "recipe.yaml", "--epochs", "3"]
    trained = subprocess.run(
        train, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=550
    )
    assert trained.returncode == 0 and "test accuracy" in trained.stdout, trained.stderr
    again = tfgpu(*words, "--output", "a/found", cwd=tmp_path)
    assert again.returncode == 2 and "a new or empty folder" in again.stderr


@pytest.mark.slow
def test_a_batch_size_as_json(tmp_path):
    words = ["batch-size", *SMALL, "--lowest", 300, "--highest", 300, "--repeats", 1, "--scale", "none", "--json"]
    done = tfgpu(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["largest"] == result["fastest"] == 300 and result["settings"] == {
        "global_batch": 300,
        "learning_rate": 0.003,
    }
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_learning_rate_is_found_and_its_recipe_trains(tmp_path):
    words = ["learning-rate", "digits", *SMALL, "--steps", 60, "--virtual-devices", 2]
    done = tfgpu(*words, "--output", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    row, line = (next(each for each in done.stdout.splitlines() if word in each) for word in ("suggestion", "Settings"))
    assert line == f"Settings: --learning-rate {row.split()[0]}"
    made = recipes.load(tmp_path / "found/recipe.yaml")
    result = json.loads((tmp_path / "found/result.json").read_text())
    assert made.learning_rate == pytest.approx(result["suggestion"], rel=0.01) == result["settings"]["learning_rate"]
    assert made.virtual_devices == 2 and (tmp_path / "found/plot.png").stat().st_size > 1000
    none = tfgpu("learning-rate", "digits", *SMALL, "--highest", 2e-6, "--steps", 20, "--json", cwd=tmp_path)
    assert none.returncode == 1 and json.loads(none.stdout)["suggestion"] is None, none.stderr
