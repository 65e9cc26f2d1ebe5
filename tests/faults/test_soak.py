"""Failures again and again: nothing that lives through them grows, and the result stays the same."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TIMES = 200
# The launcher, in a process of its own. It would wait up to 30 s before each restart.
DRIVER = """
import functools, json, pathlib, sys
from tfgpu.launch import local
from tfgpu.launch.job import Job
from tfgpu.launch.restarts import Restarts

local.Restarts = functools.partial(Restarts, first_wait_s=0.01, longest_wait_s=0.01)
job, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
job["logs"] = pathlib.Path(job["logs"])
sys.exit(local.launch(Job(**job), **options))
"""
# Worker, supervisor or guard dies, and nothing imports TensorFlow.
TINY = """
import json, os, random, signal, sys, time
from pathlib import Path
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
attempt = int(os.environ["TFGPU_ATTEMPT"])
if attempt > int(sys.argv[1]):
    sys.exit()
draw = random.Random(attempt)
who, delay_s = draw.choice(["worker 0", "worker 1", "both", "supervisor", "guard"]), draw.uniform(0, 0.05)
print("attempt", attempt, "ends with the end of", who, flush=True)
time.sleep(delay_s)
supervisor = os.getppid()
guard = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
if who in (f"worker {rank}", "both"):
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0 and who in ("supervisor", "guard"):
    os.kill({"supervisor": supervisor, "guard": guard}[who], signal.SIGKILL)
time.sleep(60)
"""


class Watched:
    """A launcher, and what it holds each time that it starts its processes again."""

    def __init__(self, folder: Path, job: dict, options: dict, environ: dict):
        folder.mkdir()
        (folder / "tmp").mkdir()
        self.folder, self.held, self.said = folder, [], []
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **environ}
        job = {"workers": 2, "logs": str(folder / "logs"), **job}
        command = [sys.executable, "-c", DRIVER, json.dumps(job), json.dumps(options)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._own = psutil.Process(self.process.pid)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for line in self.process.stderr:
            self.said = [*self.said[-60:], line]
            if re.search(r"Attempt \d+ starts", line):
                self.held.append(
                    {
                        "rss": self._own.memory_info().rss,
                        "files": self._own.num_fds(),
                        "threads": self._own.num_threads(),
                        "children": len(self._own.children(recursive=True)),
                        "temporary": len(os.listdir(self.folder / "tmp")),
                    }
                )

    def finish(self, seconds: float) -> None:
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        self._thread.join(10)
        assert code == 0, "".join(self.said)


def megabytes(held: list[dict], numbers: slice) -> float:
    return median(each["rss"] for each in held[numbers]) / 2**20


def test_a_launcher_that_starts_its_processes_again_and_again_does_not_grow(tmp_path):
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    job = {"script": str(script), "arguments": [str(TIMES)], "max_restarts": TIMES}
    launcher = Watched(tmp_path / "run", job, {"runner": [sys.executable]}, {})
    launcher.finish(400)
    held = launcher.held
    assert len(held) == TIMES
    begin, end = megabytes(held, slice(40, 60)), megabytes(held, slice(-20, None))
    # The least of many looks: on a busy machine a look may come when the next attempt has begun.
    first, last = ({name: min(each[name] for each in some) for name in held[0]} for some in (held[:20], held[-20:]))
    logs = {path.name: path.stat().st_size for path in (tmp_path / "run" / "logs").iterdir()}
    print(json.dumps({"restarts": TIMES, "MiB at 50": begin, "MiB at 200": end, "last": last, "logs": logs}))
    assert end - begin < 1
    assert last["files"] <= first["files"] and last["threads"] == first["threads"] == 1
    assert last["children"] == last["temporary"] == 0
    assert sorted(logs) == ["worker-0.log", "worker-1.log"]
    assert not os.listdir(tmp_path / "run" / "tmp")


@pytest.mark.parametrize(("devices", "times"), [(1, TIMES), (2, 60)])
def test_a_fit_that_fails_again_and_again_in_one_process_does_not_grow(devices, times, tmp_path):
    def run(name: str, *numbers: str) -> tuple[list[dict], dict]:
        command = [sys.executable, Path(__file__).parent / "soak.py", tmp_path / name, *numbers]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return lines, dict(np.load(tmp_path / f"{name}.npz"))

    # A failure comes after three quarters of an epoch, on average.
    held, found = run("cut", str(times), str(devices), str(times))
    _, whole = run("whole", "0", str(devices), str(times))
    early, late = slice(times // 4 - 10, times // 4 + 10), slice(-20, None)
    begin, end = megabytes(held, early), megabytes(held, late)
    figures = {"devices": devices, "failures": len(held), "MiB after a quarter": begin, "MiB at the end": end}
    print(json.dumps({**figures, "held after a quarter": held[times // 4], "held at the end": held[-1]}))
    assert len(held) == times
    assert end - begin < 0.02 * begin
    for name in ("files", "threads", "python threads", "folders"):
        assert max(each[name] for each in held[late]) <= max(each[name] for each in held[: early.stop]), name
    assert whole.keys() == found.keys() and all(whole[name].tobytes() == found[name].tobytes() for name in whole)


def test_workers_that_are_killed_again_and_again_end_with_the_same_bytes(tmp_path, launched, same_bytes):
    times, epochs = 12, 30
    whole = launched(tmp_path / "whole", epochs=epochs).finish()
    job = {"script": str(Path(__file__).parent / "small.py"), "max_restarts": times, "startup_timeout_s": 100}
    job["arguments"] = [str(tmp_path / "run"), "random", str(epochs)]
    launcher = Watched(tmp_path / "run", job, {}, {"LAST_FAULT": str(times), "CUDA_VISIBLE_DEVICES": ""})
    launcher.finish(400)
    held, found = launcher.held, dict(np.load(tmp_path / "run" / "end.npz"))
    figures = {"restarts": len(held), "MiB": [round(each["rss"] / 2**20, 2) for each in held]}
    print(json.dumps({**figures, "folders": sorted(os.listdir(tmp_path / "run" / "checkpoints"))}))
    assert len(held) == times
    assert held[-1]["rss"] - held[4]["rss"] < 2**20 and held[-1]["files"] <= held[0]["files"]
    assert len(os.listdir(tmp_path / "run" / "checkpoints")) <= 5
    assert same_bytes(whole, found)
