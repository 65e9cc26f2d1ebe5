import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_data_that_is_read_by_place_reads_nothing_of_what_was_trained():
    command = [sys.executable, "-m", "benchmarks.resume", "--repeats", "3", "--steps", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {(row["source"], row["place"]): row["decoded"] for row in json.loads(done.stdout)["resumes"]}
    assert found["tfgpu.data, by place", 0.9]["most"] < 8 * 40 / 2  # the next batches, and what is read ahead
    assert found["plain tf.data", 0.9]["least"] >= 8 * 36
    assert found["plain tf.data", 0.1]["least"] >= 8 * 4
