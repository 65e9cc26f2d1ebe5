"""The first checks on a GPU, rehearsed on CPU devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_first  # noqa: E402


def run(*words):
    command = [sys.executable, "-m", "benchmarks.gpu_first", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_check_runs_on_cpu_devices(tmp_path):
    path = tmp_path / "found.json"
    done = run("--on-cpu", "--json", path, "--minutes", 14, "--check-timeout", 400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["checks"]
    assert list(found) == list(gpu_first.CHECKS)
    for name in ("equality", "collectives"):
        assert all(value < 1e-5 for value in found[name]["difference"].values()), found[name]
    assert min(found["products"]["bits"].values()) > 23
    assert found["placement"]["operations"]["CPU"]["Conv2D"] >= 1
    assert all(found["seeds"]["equal bits"].values())
    assert all(isinstance(value, float) for value in found["one device"]["seconds a step"].values())


@pytest.mark.slow
def test_one_check_and_no_gpu(tmp_path):
    path = tmp_path / "found.json"
    assert run("--on-cpu", "--json", path, "--checks", "products").returncode == 0
    assert list(json.loads(path.read_text())["checks"]) == ["products"]


def test_a_missing_gpu_is_reported(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_first, "_gpus", lambda: 0)
    with pytest.raises(gpu_first.typer.Exit) as left:
        gpu_first.main(results=tmp_path / "found.json")
    assert left.value.exit_code == 2
    assert "sees no GPU" in capsys.readouterr().err and not (tmp_path / "found.json").exists()
