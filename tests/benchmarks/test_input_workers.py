import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.processes
def test_each_worker_decodes_its_share_and_without_torch_that_is_said():
    options = ["--images", "16", "--batch", "8", "--repeats", "1", "--peer", sys.executable]
    command = [sys.executable, "-m", "benchmarks.input_workers", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    decoded = {
        row["workers"]: {s: v["decoded_over_share"] for s, v in row["sides"].items()} for row in found["results"]
    }
    assert {count: sides["tfgpu"] for count, sides in decoded.items()} == {1: 1.0, 2: 1.0, 4: 1.0}
    assert {count: sides["whole"] for count, sides in decoded.items()} == {1: 1.0, 2: 2.0, 4: 4.0}
    assert "torch" in decoded[4] or "has no torch" in found["facts"]["missing"]
