"""Incremental learning with two parameter-server workers: real processes, stopped within a task and restarted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("served_run.py")
ROOT = Path(__file__).parents[3]
JOBS = {"chief": 1, "worker": 2, "ps": 1}
ROWS = 60
pytestmark = [pytest.mark.slow, pytest.mark.processes]


def one_device(folder, how, *more):
    command = [sys.executable, str(SCRIPT), str(folder), how, "none", *map(str, more)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550)
    assert ran.returncode == (7 if more else 0), ran.stderr[-3000:]
    return None if more else json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture
def served(addresses, tmp_path):
    """Runs the script on a chief, two workers and a server; returns the chief's output, or None if it has to die."""

    def run(folder, how, staleness, *more):
        left = iter(addresses(sum(JOBS.values())))
        cluster = {job: [next(left) for _ in range(count)] for job, count in JOBS.items()}
        running = []
        try:
            for job, count in JOBS.items():
                for index in range(count):
                    place = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
                    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": place}
                    command = [sys.executable, str(SCRIPT), str(folder), how, str(staleness), *map(str, more)]
                    kept = open(tmp_path / f"{job}{index}.err", "wb")
                    running.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=kept))
                    kept.close()
            out, _ = running[0].communicate(timeout=550)
            assert running[0].returncode == (7 if more else 0), (tmp_path / "chief0.err").read_text()[-4000:]
            return None if more else json.loads(out.splitlines()[-1])
        finally:
            for process in running:
                process.kill()
                process.communicate()

    return run


def difference(one, other):
    pairs = zip(one["weights"], other["weights"], strict=True)
    return max(float(np.abs(np.array(a, "float32") - np.array(b, "float32")).max()) for a, b in pairs)


def rows_of(logs):
    """The number of rows in each epoch of a task and the sum of their labels: each row counts 100 plus its label."""
    return [np.atleast_1d(log["rows"]).tolist() for log in logs]


@pytest.mark.parametrize("how", ["tasks", "stream"])
def test_one_at_a_time_two_workers_are_one_device(served, tmp_path, how):
    """Also if the chief dies in the second task: training resumes from the checkpoint."""
    whole = one_device(tmp_path / "one", how)
    assert served(tmp_path / "many", how, 0, 2) is None
    assert (tmp_path / "many/task-0001/fit").is_dir()
    found = served(tmp_path / "many", how, 0)
    assert difference(whole, found) <= 1e-5
    assert (found["updates"], found["seen"], found["kept"]) == (whole["updates"], whole["seen"], whole["kept"])
    assert rows_of(found["logs"]) == rows_of(whole["logs"])


@pytest.mark.parametrize("how", ["tasks", "stream"])
def test_two_asynchronous_workers_see_all_rows_and_learn(served, tmp_path, how):
    whole, found = one_device(tmp_path / "one", how), served(tmp_path / "many", how, "none")
    assert all(np.isfinite(np.array(weight)).all() for weight in found["weights"])
    assert rows_of(found["logs"]) == rows_of(whole["logs"])  # each row once, replayed ones too
    assert (found["updates"], found["seen"], found["kept"]) == (whole["updates"], whole["seen"], whole["kept"])
    assert found["right"] > 0.6 and found["last"] > 0.6  # of six classes; the first tasks are not forgotten
    if how == "tasks":
        for log in found["logs"]:
            assert log["loss"][-1] < log["loss"][0]
