import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu import cli
from tfgpu.errors import InputError
from tfgpu.measure.rates import Rate
from tfgpu.measure.workers import Stage, WorkersReport, measure_workers
from tfgpu.recipes.recipe import Recipe


def test_the_table_says_what_all_workers_do(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rates = {"alone": Rate((400.0,)), "worker": Rate((90.0, 110.0))}
    stages = (Stage("order", 4, "3 ms"), Stage("read", 1.75, "with the partners of mixup"))
    about = {"input_shape": [8, 8, 1], "global_batch": 32, "cores": 2}
    found = WorkersReport(Recipe(), 4, rates["alone"], rates["worker"], rates, stages, about)
    cli.profile._show_workers(found)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert "on one of 4 workers: examples of 8×8×1, global batches of 32" in text and "supply 400 examples/s" in text
    assert ["a", "worker", "100", "20%", "100"] in rows
    assert ["order", "4.00", "on", "every", "worker,", "3", "ms"] in rows
    assert ["read", "1.75", "with", "the", "partners", "of", "mixup"] in rows


@pytest.mark.slow
def test_a_worker_reads_its_share_and_partners_besides():
    what = Recipe(model="mlp", global_batch=32, augment=["mixup", "noise"])
    found = measure_workers(what, 4, seconds=0.02, repeats=1)
    work = {stage.name: stage.work for stage in found.stages}
    assert 1.4 < work["read"] < 2.0  # a row and its partner: 4 * (1/4 + 3/4 * 1/4) = 1.75 on average
    assert work["order"] == work["open the source"] == work["draw random numbers"] == 4
    assert found.supply == 4 * found.worker.median > 0 and found.cpu_us["worker"].median > 0
    assert found.as_json()["stages"][0] == {"stage": "open the source", "work": 4, "note": found.stages[0].note}


def test_what_cannot_be_measured_is_named(monkeypatch):
    with pytest.raises(InputError, match="`workers` must be a whole number from 1 to 32"):
        measure_workers(Recipe(global_batch=32), 33)
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(InputError, match="Unset TF_CONFIG"):
        measure_workers(Recipe(), 2)


@pytest.mark.slow
def test_the_command(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["--workers", "2", "--seconds", "0.05", "--repeats", "2", "--json"]
    command = [sys.executable, "-m", "tfgpu", "profile", "input", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] == 2 and found["examples_per_s"]["worker"]["repeats"] == 2
    assert {stage["stage"]: stage["work"] for stage in found["stages"]}["read"] == pytest.approx(1.0, abs=0.01)
    assert os.listdir(tmp_path) == []
