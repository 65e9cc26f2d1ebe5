"""Workers that are killed while they save."""

import subprocess
import sys

import pytest

from benchmarks import measured


@pytest.mark.slow
@pytest.mark.processes
def test_the_newest_checkpoint_is_whole_after_each_kill():
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--kills", "2", "--width", "16"]
    done = subprocess.run(command, cwd=measured.ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    kills, _, damaged, _ = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert (kills, damaged) == ("2", "0")
