"""docs/start/five-minutes.md, followed: its scripts and its commands, with the lines that it shows."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "start" / "five-minutes.md").read_text()
BLOCKS = dict(enumerate(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE), 1))
LAST_EPOCH = re.search(r"accuracy: .* - val_loss: [\d.]+", PAGE)[0]
BOUND = ("--rtol", "1e-4", "--atol", "1e-5")
TIMEOUT_S = 400


def start(folder: Path, *words: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *words: str) -> str:
    process = start(folder, *words)
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, printed
    return printed


def verify(folder: Path, *words: str) -> str:
    return run(folder, "-m", "tfgpu", "compare", "weights", *words)


def kill_in_epoch(process: subprocess.Popen, epoch: str) -> None:
    """Kills the newest worker when the epoch's line appears."""
    for line in process.stdout:
        if epoch in line:
            break
    workers = [each for each in psutil.Process(process.pid).children(recursive=True) if "train.py" in each.cmdline()]
    max(workers, key=psutil.Process.create_time).kill()


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[1])
    assert LAST_EPOCH in run(tmp_path, "train.py")

    script.write_text(BLOCKS[2])
    assert LAST_EPOCH in run(tmp_path, "train.py")
    assert "Equal within the bound" in verify(tmp_path, "one.keras", "two.keras", *BOUND)

    script.write_text(BLOCKS[2][: BLOCKS[2].index("model.fit")] + BLOCKS[3])
    printed = run(tmp_path, "-m", "tfgpu", "launch", "-n", "2", "train.py")
    assert printed.count(LAST_EPOCH) == 2
    assert "Equal within the bound" in verify(tmp_path, "one.keras", "four.keras", *BOUND)

    (tmp_path / "four.keras").rename(tmp_path / "whole.keras")
    (tmp_path / "run").rename(tmp_path / "run-whole")
    process = start(tmp_path, "-m", "tfgpu", "launch", "-n", "2", "--max-restarts", "1", "train.py")
    try:
        kill_in_epoch(process, "Epoch 5/10")
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    first, _, second = printed.partition("Attempt 2 starts")
    assert "killed by SIGKILL" in first
    assert "Epoch 1/10" not in second and LAST_EPOCH in second, "it began anew in place of resuming"
    assert "Equal bit by bit" in verify(tmp_path, "whole.keras", "four.keras")
