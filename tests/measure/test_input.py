import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfgpu import cli
from tfgpu.errors import InputError
from tfgpu.measure.input import InputReport, Trial, _advice, measure_input
from tfgpu.measure.rates import Rate
from tfgpu.recipes.recipe import Recipe


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_jpeg(random.integers(0, 256, [16, 12, 3], dtype=np.uint8)).numpy())
    return tmp_path / "photos"


@pytest.mark.slow
def test_every_part_is_measured_for_real(photos, tmp_path):
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
    words = ["--data", photos, "--cache", "none", "--model", "mlp", "--batch", 8]
    command = [sys.executable, "-m", "tfgpu", "profile", "input", *words, "--seconds", 0.02, "--repeats", 2, "--json"]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: rate["repeats"] for name, rate in found["examples_per_s"].items()} == {
        "input": 2,
        "model": 2,
        "together": 2,
    }
    assert all(rate["median"] > 0 for rate in found["examples_per_s"].values())
    tried = {trial["setting"]: trial for trial in found["trials"]}
    assert {"cache='memory'", "parallel_calls=1", "prefetch=0", "augment='none'"} <= tried.keys()
    ratios = [trial["ratio"] for trial in found["trials"]]
    assert ratios == sorted(ratios, reverse=True) and min(ratios) > 0
    assert found["facts"]["cache"] == "none" and found["facts"]["global_batch"] == 8
    assert found["bottleneck"] in found["advice"]
    assert os.listdir(tmp_path) == ["photos"]  # No cache and no run is left.


def rate(*values):
    return Rate(tuple(map(float, values)))


TRIALS = [
    Trial("augment='none'", rate(900, 900), 9.0, "shows the cost of augmentation"),
    Trial("cache='memory'", rate(310, 290), 3.0),
    Trial("prefetch=0", rate(95, 96), 0.95),
]


@pytest.mark.parametrize(
    "bottleneck, base, model, together, shared, tried, text",
    [
        ("input", 100, 400, 98, False, TRIALS, "the model waits 75% of the time. cache='memory' makes .* 3.0 times"),
        ("input", 100, 400, 98, False, TRIALS[2:], "No measured setting"),
        ("input", 100, 400, 98, False, [Trial("prefetch=0", rate(150, 90), 1.2)], "No measured setting"),
        ("model", 400, 100, 98, False, TRIALS, "input is 4.0 times as fast. No setting of the input"),
        ("model", 400, 100, 60, True, TRIALS[2:], "compete for the CPU.*No measured setting"),
    ],
)
def test_the_advice_names_the_bottleneck_and_what_clearly_moves_it(
    bottleneck, base, model, together, shared, tried, text
):
    assert re.search(text, _advice(bottleneck, rate(base, base), rate(model), rate(together), shared, tried))


def test_the_table_says_it_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    about = {"input_shape": [8, 8, 1], "global_batch": 32, "devices": ["CPU:0"], "cores": 2}
    advice = "The input is the bottleneck."
    report = InputReport(Recipe(), rate(100, 110), rate(400), rate(98), "input", False, tuple(TRIALS), advice, about)
    cli.profile._show_input(report)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["input", "alone", "105", "10%", "the", "bottleneck"] in rows
    assert ["cache='memory'", "300", "3.00"] in rows and "examples of 8×8×1, batches of 32" in text
    assert advice in text


def test_several_workers_are_refused(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(InputError, match="Unset TF_CONFIG"):
        measure_input(Recipe())
