"""Shell completion of commands, options and their values, without TensorFlow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tfgpu import cli, models
from tfgpu.callbacks import tracking
from tfgpu.cli import completion
from tfgpu.data.augmentation.stages import STAGES
from tfgpu.models import parts
from tfgpu.parallel.pipeline.schedule import SCHEDULES
from tfgpu.parallel.planning import hardware
from tfgpu.recipes import compiling, ready
from tfgpu.recipes.recipe import Recipe, choices
from tfgpu.serving.formats import FORMATS
from tfgpu.tune import journal, scaling

ROOT = Path(__file__).parent.parent
# As a shell starts it, and then: what is slow, and was imported all the same.
ASKED = """
import atexit, sys
slow = {"tensorflow", "keras", "numpy", "matplotlib", "sklearn", "optuna"}
atexit.register(lambda: print("imported:", *sorted(slow & set(sys.modules)), file=sys.stderr))
from tfgpu.cli import main
main([])
"""


def completed(line: str, cwd: Path) -> list[str]:
    words = line.split(" ")
    asked = {"_TFGPU_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=550, cwd=cwd, env=environment
    )
    assert done.stderr == "imported:\n", done.stderr
    return done.stdout.split()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tfgpu trai", ["train"]),
        ("tfgpu tun", ["tune"]),
        ("tfgpu tune b", ["batch-size"]),
        ("tfgpu tune batch-size im", ["imagenet", "imagenet_lars"]),
        ("tfgpu train --opti", ["--optimizer", "--optimizer-option"]),
        ("tfgpu train cif", ["cifar10"]),
        ("tfgpu train digits --optimizer adam", ["adam", "adamax", "adamw"]),
        ("tfgpu train --model t", ["textcnn", "transformer"]),
        ("tfgpu tune --sampler ", list(journal.SAMPLERS)),
        ("tfgpu export runs/best out --format ", list(FORMATS)),
        ("tfgpu train --output no", []),  # files are the shell's own to complete
    ],
)
def test_the_shell_completes_it_without_tensorflow(tmp_path, line, expected):
    assert completed(line, tmp_path) == expected


# Where the names come from: what a running program has, against what is read from the text of its modules.
NAMES = {
    "model": [*models.BUILDERS, *models.applications()],
    "optimizer": sorted(compiling.optimizers()),
    "augment": ["auto", "none", *STAGES],
    "initializer": list(parts.INITIALIZERS),
    "normalization": list(parts.NORMALIZATIONS),
}
CASES = [
    *(("train", name, names) for name, names in NAMES.items()),
    *(("train", name, list(choices(name))) for name in Recipe.model_fields if choices(name)),
    *(
        (command, "name", list(ready.names()))
        for command in ("train", "tune batch-size", "tune learning-rate", "profile input")
    ),
    ("profile", "target", ["input", "pipeline", *ready.names()]),
    ("tune", "name", ["batch-size", "learning-rate", *ready.names()]),
    ("train", "track", list(tracking.TRACKERS)),
    ("tune", "optimizer", NAMES["optimizer"]),
    ("tune", "sampler", list(journal.SAMPLERS)),
    ("tune", "pruner", list(journal.PRUNERS)),
    ("tune batch-size", "scale", list(scaling.RULES)),
    ("tune learning-rate", "model", NAMES["model"]),
    ("export", "formats", list(FORMATS)),
    ("plan", "model", NAMES["model"]),
    ("plan", "device", list(hardware.DEVICES)),
    ("profile pipeline", "model", NAMES["model"]),
    ("profile pipeline", "pipeline_schedule", list(SCHEDULES)),
    ("doctor", "model", NAMES["model"]),
    ("profile input", "cache", list(choices("cache"))),
]


def proposed(command: str, parameter: str, begun: str) -> list[str]:
    found = typer.main.get_command(cli.app)
    found = found.commands[command]
    (one,) = (each for each in found.params if each.name == parameter)
    context = found.context_class(found, info_name=command)
    return [item.value for item in one.shell_complete(context, begun)]


@pytest.mark.parametrize(("command", "parameter", "names"), CASES, ids=lambda v: v if type(v) is str else "")
def test_the_names_are_those_that_the_code_takes(command, parameter, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder without recipes
    assert names and proposed(command, parameter, "") == names
    assert names[0] in proposed(command, parameter, names[0][:2])
    assert proposed(command, parameter, "no such name") == []


def test_a_recipe_may_be_a_file_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits_mine.yaml", "digits_old.yml", "digits.txt"):
        (tmp_path / name).touch()
    assert proposed("train", "name", "digits") == ["digits", "digits_mine.yaml", "digits_old.yml"]


def test_without_keras_the_shell_completes_what_is_ours(monkeypatch):
    monkeypatch.setattr(completion.importlib.util, "find_spec", lambda name: None)
    assert proposed("train", "model", "") == list(models.BUILDERS)
