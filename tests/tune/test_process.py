import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tfgpu.errors import InputError
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import process
from tfgpu.tune.trial import last_of, value_of


def test_the_end_of_a_silent_process(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\nModuleNotFoundError: No module named 'nets'\n\n")
    assert process.describe(1, str(log)).endswith("code 1: ModuleNotFoundError: No module named 'nets'")
    with open(log, "wb") as file:  # 1 GB of one line that steers the terminal
        file.truncate(10**9)
        file.seek(0, 2)
        file.write(b"\x1b[2J" + b"a" * 100_000)
    tracemalloc.start()
    told = process.describe(1, str(log))
    assert tracemalloc.get_traced_memory()[1] < 10**7 and len(told) < 600 and told.isprintable()
    tracemalloc.stop()
    assert "SIGSEGV" in process.describe(-11, str(log))
    assert process.describe(-40, str(log)) == "The process was killed by signal 40."  # a real-time signal: no name


@pytest.mark.slow
def test_what_a_failing_trial_printed_is_in_its_log_and_its_reason_is_short(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(
        "import sys\n"
        "from tfgpu.tune.trial import serve\n"
        "def work(task, line):\n"
        "    print('before')\n"
        "    raise ValueError('y' * 5_000_000)\n"
        "serve(int(sys.argv[1]), work)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    trial = process.TrialProcess({}, str(tmp_path / "log"), {}, "fails")
    try:
        until = time.monotonic() + 500
        while not (news := trial.news(0.1)) and time.monotonic() < until:
            pass
    finally:
        trial.stop()  # As the study does: at once.
    assert news[-1]["end"] == "failed" and 100 < len(news[-1]["reason"]) <= 1000
    log = (tmp_path / "log").read_text()
    assert "before" in log and "Traceback" in log and len(log) > 5_000_000


def test_gpus_are_shared_out_and_cores_where_there_are_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert process.visible_gpus() == ("2", "5", "7")
    assert process.places(1, use_ray=False).slots == 1
    where = process.places(2, use_ray=False)
    assert where.slots == 2 and where._devices == ("2", "5") and where._threads is None
    with pytest.raises(InputError, match="Received: parallel=4, GPUs=3. Use 3."):
        process.places(4, use_ray=False)
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        where = process.places(64, use_ray=False)
        assert where.slots == 64 and set(where._devices) == {""} and where._threads == 1


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, ["GPU-1f0c5a92", "GPU-2e7d1b40"]),
        ({"GPUS": "4", "LOST": "1"}, ["GPU-1f0c5a92", "GPU-3b6a90c1", "GPU-4c51d7e8"]),
        ({"LOST_UNDER_WAY": "1"}, ["GPU-1f0c5a92"]),
        ({"MIG": "1", "SLICES": "1"}, ["0", "1"]),
        ({"INIT": "9"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2e7d,0"}, ["GPU-2e7d", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["1"]),  # CUDA stops there
    ],
)
def test_trials_get_gpus_by_uuid_and_none_that_is_lost(told, expected, nvml):
    code = "import json; from tfgpu.tune import process; print(json.dumps(process.visible_gpus()))"
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "LD_LIBRARY_PATH": str(nvml), **told},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_the_epoch_that_counts_is_the_one_whose_weights_the_run_ends_with():
    rows = [{"val_loss": loss, "val_accuracy": 0.5 + loss / 10} for loss in (0.9, 0.4, 0.6)]
    assert last_of(rows, Recipe(), "val_error") is rows[2]
    assert last_of(rows, Recipe(early_stopping=2), "val_error") is rows[1]
    by_accuracy = Recipe(early_stopping=2, early_stopping_options={"monitor": "val_accuracy"})
    assert last_of(rows, by_accuracy, "val_error") is rows[0]
    kept = Recipe(early_stopping=2, early_stopping_options={"restore_best": False})
    assert last_of(rows, kept, "val_error") is rows[2]
    assert value_of(rows[0], "val_loss") == 0.9 and value_of(rows[0], "val_error") == pytest.approx(0.41)
    with pytest.raises(InputError, match="do not contain 'val_f1'"):
        value_of(rows[0], "val_f1")


def test_a_trial_whose_study_is_killed_ends_too(tmp_path):
    """The child waits for its task while its parent is killed."""
    script = (
        "import subprocess, sys, time, multiprocessing\n"
        "mine, inner = multiprocessing.Pipe()\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tfgpu.tune.trial', str(inner.fileno())],"
        " pass_fds=[inner.fileno()], start_new_session=True)\n"
        "inner.close()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(holder.stdout.readline())
    finally:
        holder.kill()
        holder.wait(300)
        holder.stdout.close()
    until = time.monotonic() + 500
    while time.monotonic() < until and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_a_trial_has_forked_neither_hides_its_end_nor_outlives_it(tmp_path, monkeypatch, how):
    forks = "import os, time\nif os.fork():\n    print(os.getpid(), flush=True)\ntime.sleep(100)\n"
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{forks}")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(tmp_path / "python"))
    trial = process.TrialProcess({}, str(tmp_path / "log"), {})
    until = time.monotonic() + 500
    while not (tmp_path / "log").read_text().strip() and time.monotonic() < until:
        time.sleep(0.05)
    pid = int((tmp_path / "log").read_text())
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    try:
        assert not trial.news() and _runs(child)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + 500
            while not (news := trial.news(0.1)) and time.monotonic() < until:
                pass
            assert news and news[0]["end"] == "failed" and "SIGKILL" in news[0]["reason"]
        trial.stop()
        until = time.monotonic() + 500
        while _runs(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not _runs(child)
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
