"""Ready recipes are valid, and each starts in a dry run that writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu.errors import InputError
from tfgpu.recipes import dry, ready, recipe

ROOT = Path(__file__).parents[2]
QUICK = ("cifar10", "digits", "language_model")
LARGE = ("imagenet", "imagenet_lars")
PRETRAINED = ("finetune-text",)
EXAMPLES = {"cifar10": "32×32×3, 10", "digits": "8×8×1, 10", "language_model": "256, 256"}
EXAMPLES |= dict.fromkeys(LARGE, "224×224×3, 1,000")


def dry_runs(names, folder, *words, timeout=550):
    """Runs them one after another in one process, which takes seconds to start."""
    code = (
        "import sys; sys.modules['tensorflow_datasets'] = None  # a dry run starts without it\n"
        "from tfgpu.cli import _execute\n"
        "for name in sys.argv[1].split(','): print('exit', _execute(['train', name, '--dry-run', *sys.argv[2:]]))"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    command = [sys.executable, "-c", code, ",".join(names), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert not list(folder.iterdir())
    return done


def check(names, done):
    parts = done.stdout.split("exit ")
    assert len(parts) == len(names) + 1, done.stderr[-2000:]
    for name, part, after in zip(names, parts, parts[1:], strict=False):
        assert after.startswith("0"), (name, done.stderr[-2000:])
        assert "synthetic data; nothing is written" in part and f"examples of {EXAMPLES[name]} classes" in part, part
        assert "parameters" in part and "MiB of weights" in part and "peak memory host" in part and "val_loss" in part


def test_every_ready_recipe_is_valid_and_says_what_it_does():
    assert set(ready.names()) == {*QUICK, *LARGE, *PRETRAINED}
    for name in ready.names():
        recipe.make(ready.read(name), source=name)
        assert ready.describe(name).endswith(".") and not ready.describe(name).startswith("#")


def test_the_digits_recipe_is_the_default():
    assert recipe.make(ready.read("digits")) == recipe.Recipe()


@pytest.mark.slow
def test_the_quick_ones_start_on_two_replicas(tmp_path):
    check(QUICK, dry_runs(QUICK, tmp_path, "--virtual-devices", "2"))


@pytest.mark.slow
def test_one_starts_with_all_that_a_recipe_can_ask_for(tmp_path):
    words = ["--augment", "mixup", "--label-smoothing", "0.1", "--optimizer", "lars", "--weight-decay", "1e-4"]
    words += ["--weight-average", "ema", "--accumulate", "2", "--schedule", "polynomial"]
    words += ["--model", "mlp", "--model-option", "widths=[16]", "--model-option", "normalization=batch"]
    done = dry_runs(["digits"], tmp_path, *words)
    check(["digits"], done)
    assert "4 steps of 4 examples (cut from 32 for CPUs)" in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_the_large_ones_start(tmp_path):
    check(LARGE, dry_runs(LARGE, tmp_path, timeout=800))


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"data": "photos/", "image_size": [64, 48], "classes": 5}, ((64, 48, 3), 5, "image")),
        ({"data": "corpus:book.txt"}, ((256,), 256, "corpus")),
        ({"data": "corpus:book.txt", "length": 99}, ((99,), 256, "corpus")),
        ({"data": "photos/", "image_size": 64}, None),
        ({"data": "flowers.csv"}, None),
    ],
)
def test_what_a_recipe_says_of_its_examples(settings, shape):
    assert dry.shape_of(recipe.make(settings)) == (shape and dry.Shape(*shape))


def test_data_without_a_known_shape_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="No such data folder or file: 'nothing/'"):
        dry.run(recipe.make({"data": "nothing/"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [("imagnet", "Did you mean 'imagenet'"), ("no/such", "No such recipe"), ("no.yaml", "Cannot read the config file")],
)
def test_a_missing_recipe(name, message):
    with pytest.raises(InputError, match=message):
        ready.read(name)


def test_a_file_is_a_recipe_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("epochs: 3\n")
    assert ready.read(str(path)) == {"epochs": 3}
