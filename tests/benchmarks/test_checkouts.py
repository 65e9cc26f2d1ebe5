"""The comparison of two checkouts runs both, in turn, and prints a ratio for each model and topology."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_checkout_beside_itself(tmp_path):
    path = tmp_path / "ratios.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkouts", str(ROOT), "--tiny", "--works", "mlp", "--topologies", "one"]
        + ["--rounds", "3", "--warmup", "1", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^mlp +one +\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\), 3 rounds$", done.stdout, re.M)
    (found,) = json.loads(path.read_text()).values()
    assert len(found) == 3 and all(ratio > 0 for ratio in found)
