"""Small real studies; each trial is a process that starts TensorFlow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna", reason="needs Optuna: pip install 'tfgpu[tune]'")

from tfgpu import tune
from tfgpu.errors import InputError, MachineError
from tfgpu.recipes import recipe as recipes
from tfgpu.sensors import table

ROOT = Path(__file__).parents[2]
SMALL = {"model": "mlp", "model_options": {"widths": [16]}, "epochs": 2, "global_batch": 256, "schedule": "constant"}
SEARCH = {"learning_rate": "1e-4..1e-1:log", "optimizer": ["adam", "momentum"]}


def command(*words):
    return [sys.executable, "-m", "tfgpu", "tune", *map(str, words)]


def environ():
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "150", "TERM": "dumb"}


# Refused before TensorFlow trains


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"trials": 0}, "`trials` must be a whole number of at least 1. Received: 0."),
        ({"parallel": True}, "`parallel` must be a whole number"),
        ({"timeout_s": 0}, "`timeout_s` must be above 0"),
        ({"timeout_s": "60"}, "`timeout_s` must be above 0"),
        ({"sampler": "tpa"}, "Did you mean 'tpe'?"),
        ({"pruner": "medain"}, "Did you mean 'median'?"),
        ({"search": ["learning_rte=1..2"]}, "Did you mean 'learning_rate'?"),
        ({"search": ["optimizer=adma,sgd"]}, "Unknown optimizer 'adma'"),
        ({"recipe": recipes.make({"model": "ResNet50"}), "search": ["dropout=0..0.5"]}, "has no setting dropout"),
        ({"search": ["initializer=he_norml,orthogonal"]}, "Unknown initializer 'he_norml'. Did you mean 'he_normal'?"),
        ({"search": ["normalization=none,batchh"]}, "Unknown normalization 'batchh'. Did you mean 'batch'?"),
        ({"search": ["model_options.activation=relu,geluu"]}, "Unknown activation 'geluu'. Did you mean 'gelu'?"),
        ({"recipe": recipes.make({**SMALL, "initializer": "he_norml"}), "search": SEARCH}, "Did you mean 'he_normal'?"),
        ({"recipe": recipes.make({"model": "vit"}), "search": ["normalization=layer,group"]}, "'group'"),
        ({"search": ["model=mlp,cnm"]}, "Unknown model 'cnm'. Did you mean 'cnn'?"),
        ({"search": ["model=mlp,vit", "normalization=batch,layr"]}, "Did you mean 'layer'?"),
        ({"resume": True}, "has no study to resume"),
        ({"recipe": "digist"}, "Did you mean 'digits'?"),
    ],
)
def test_wrong_input_writes_nothing(tmp_path, settings, expected):
    with pytest.raises(InputError) as caught:
        tune.study(**{"recipe": recipes.make(SMALL), "folder": tmp_path / "study", **settings})
    assert expected in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="is not an empty folder"):
        tune.study(recipes.make(SMALL), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# Real trials


@pytest.mark.slow
def test_a_study_leaves_a_recipe_that_repeats_its_best_trial(tmp_path):
    told = []
    found = tune.study(
        recipes.make(SMALL), tmp_path / "one", trials=3, search=SEARCH, seed=1, on_trial=lambda t: told.append(t.number)
    )
    assert told == [0, 1, 2] and [trial.status for trial in found.trials] == ["complete"] * 3
    assert found.own.settings == {"learning_rate": 0.003, "optimizer": "adam"}
    assert found.best.value == min(trial.value for trial in found.trials)
    assert all(len(trial.epochs) == 2 and trial.epochs[2] == trial.value for trial in found.trials)
    from tfgpu.recipes import runner

    again = runner.run(recipes.load(found.recipe_file), output=tmp_path / "again")
    # Losses, which tell the trials apart; another number of threads rounds sums otherwise.
    losses = [table.read(tmp_path / "one" / trial.folder / "metrics.csv")[-1]["val_loss"] for trial in found.trials]
    loss, own = again.history[-1]["val_loss"], losses[found.best.number]
    print(losses, loss)
    assert loss == pytest.approx(own, rel=1e-4)
    assert all(abs(other / own - 1) > 0.01 for trial, other in enumerate(losses) if trial != found.best.number)
    same = tune.study(recipes.make(SMALL), tmp_path / "two", trials=3, search=SEARCH, seed=1)
    assert [(t.settings, t.value) for t in same.trials] == [(t.settings, t.value) for t in found.trials]


@pytest.mark.slow
def test_a_killed_study_resumes_and_equals_an_uninterrupted_one(tmp_path):
    words = ["--trials", 4, "--search", "learning_rate=1e-4..1e-1:log", "--epochs", 6, "--model", "mlp"]
    words += ["--model-option", "widths=[16]", "--batch", 64, "--pruner", "none"]
    killed = subprocess.Popen(
        command(*words, "--output", "study"), cwd=tmp_path, env=environ(), stdout=subprocess.DEVNULL
    )
    try:
        metrics = tmp_path / "study/trials/0002/metrics.csv"
        until = time.monotonic() + 500
        while time.monotonic() < until and (not metrics.exists() or len(metrics.read_text().splitlines()) < 3):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(300)
    kept = [json.loads(line) for line in (tmp_path / "study/journal.log").read_text().splitlines()]
    assert kept
    resumed = command("--resume", "--output", "study", "--trials", 4)
    done = subprocess.run(resumed, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(command(*words, "--output", "whole"), cwd=tmp_path, env=environ(), timeout=550)
    assert done.returncode == 0

    def trials(name):
        found = sorted((tmp_path / name / "trials").glob("*/config.yaml"))
        return [yaml.safe_load(path.read_text()) for path in found]

    whole, halves = trials("whole"), trials("study")
    assert len(whole) == len(halves) == 4
    for one, other in zip(whole, halves, strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        assert one["run"]["test_loss"] == pytest.approx(other["run"]["test_loss"], rel=1e-4)
    assert (tmp_path / "study/best.yaml").read_text() == (tmp_path / "whole/best.yaml").read_text()


@pytest.mark.slow
def test_a_study_resumes_without_the_folders_of_its_trials(tmp_path):
    folder = tmp_path / "study"
    first = tune.study(recipes.make({**SMALL, "epochs": 1}), folder, trials=2, search=SEARCH, seed=1)
    assert first.test_accuracy is not None
    shutil.rmtree(folder / first.best.folder)
    found = tune.study(folder=folder, trials=3, resume=True)
    assert found.trials[:2] == first.trials and (folder / "trials/0002/config.yaml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trials_that_end_badly_do_not_end_the_study(tmp_path, monkeypatch):
    """One trial diverges, one is killed, one times out; each has its reason."""
    (tmp_path / "nets.py").write_text(
        "import os, time, keras\n"
        "def net(input_shape, classes, *, fault):\n"
        "    if fault == 'dies': os.kill(os.getpid(), 9)\n"
        "    if fault == 'sleeps': time.sleep(3600)\n"
        "    bias = 'zeros' if fault != 'nan' else keras.initializers.Constant(float('nan'))\n"
        "    layers = [keras.layers.Flatten(), keras.layers.Dense(classes, bias_initializer=bias)]\n"
        "    return keras.Sequential([keras.Input(input_shape), *layers])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    base = recipes.make({**SMALL, "model": "nets:net", "model_options": {"fault": "none"}, "epochs": 1})
    found = tune.study(
        base,
        "study",
        trials=12,
        parallel=2,
        search={"model_options.fault": ["none", "dies", "nan", "sleeps"]},
        sampler="random",
        seed=2,
        timeout_s=240,  # a trial of the others takes 10 s on an idle machine
    )
    ends = {trial.settings["model_options.fault"]: trial for trial in found.trials}
    assert set(ends) == {"none", "dies", "nan", "sleeps"}
    assert ends["none"].status == "complete" and found.best.settings == {"model_options.fault": "none"}
    assert ends["dies"].status == "failed" and "SIGKILL" in ends["dies"].reason
    assert ends["nan"].status == "diverged" and "nan" in ends["nan"].reason
    assert ends["sleeps"].status == "timed out" and ends["sleeps"].reason == "not finished after 240 s"


@pytest.mark.slow
def test_odd_settings_of_one_trial_do_not_end_the_study(tmp_path, monkeypatch):
    """Trial 0 cannot begin: its settings are only valid separately. Then the folder is removed."""
    base = recipes.make({**SMALL, "epochs": 6})
    search = {"warmup_epochs": "1..4", "epochs": [1, 3]}
    found = tune.study(base, tmp_path / "study", trials=2, search=search, sampler="random", seed=16)
    assert [trial.status for trial in found.trials] == ["failed", "complete"]
    assert found.trials[0].reason.startswith("`warmup_epochs` must be below `epochs`")

    def gone(trial):
        (tmp_path / "study/journal.log").unlink()

    with pytest.raises(MachineError, match=r"The study stopped: .*journal.log'\. Fix it, and use --resume"):
        tune.study(folder=tmp_path / "study", trials=4, resume=True, on_trial=gone)


@pytest.mark.slow
def test_a_fault_of_all_trials_ends_the_study_with_one_error(tmp_path):
    base = recipes.make({**SMALL, "classes": 7})
    with pytest.raises(MachineError, match=r"The first 3 trials all failed in the same way: `classes` must be"):
        tune.study(base, tmp_path / "study", trials=20, search={"learning_rate": "1e-4..1e-1:log"})


@pytest.mark.slow
def test_halving_ends_all_but_the_best_third_at_each_rung(tmp_path):
    base = recipes.make({**SMALL, "epochs": 9, "optimizer": "sgd"})
    rates = [0.1, 1e-6, 2e-6, 0.2]  # two learn, two do not
    found = tune.study(
        base,
        tmp_path / "study",
        trials=4,
        pruner="halving",
        sampler="random",
        seed=38,  # draws each of them once, the two that learn first
        search={"learning_rate": rates},
    )
    assert [trial.settings["learning_rate"] for trial in found.trials] == [0.1, 0.2, 1e-6, 2e-6]
    # Optuna's rungs are after 1, 3 and 9 epochs; a trial that is not among the best third there ends.
    best_at: dict[int, list[float]] = {1: [], 3: [], 9: []}
    for trial in found.trials:
        ended = None
        for rung, seen in best_at.items():
            if ended is None and rung in trial.epochs:
                seen.append(trial.epochs[rung])
                place = max(len(seen) // 3, 1)
                ended = rung if trial.epochs[rung] > sorted(seen)[place - 1] else None
        assert trial.status == ("complete" if ended is None else "pruned"), (trial, ended)
        assert max(trial.epochs) == (9 if ended is None else ended)
    assert {trial.status for trial in found.trials} == {"complete", "pruned"}


@pytest.mark.slow
def test_trials_on_ray(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'tfgpu[ray]'")
    found = tune.study(
        recipes.make({**SMALL, "epochs": 1}), tmp_path / "study", trials=2, parallel=2, use_ray=True, search=SEARCH
    )
    assert [trial.status for trial in found.trials] == ["complete", "complete"]
