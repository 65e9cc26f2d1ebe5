"""A fast slice of the equivalence matrix: the cases that were hardest to make equal, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
CASES = (
    "batchnorm-uneven",
    "accumulate-global_clipnorm",
    "class-weights-uneven",
    "last-of-1",
    "files",
    "loss-Circle",
    "own-state",
    "accumulate-5",
    "cnn-uneven",
)


@pytest.mark.processes
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("topologies", "cases", "way"),
    [
        (["workers-2x1"], CASES[:2], []),
        pytest.param(["mirrored-4", "workers-2x1"], CASES, [], marks=pytest.mark.slow),
        pytest.param(["mirrored-2", "workers-2x1"], CASES, ["--gpu-way"], marks=pytest.mark.slow),
    ],
    ids=["few", "all", "gpu-way"],
)
def test_replicas_and_workers_learn_what_one_device_learns(tmp_path, topologies, cases, way):
    command = [sys.executable, RUN, "--topologies", *topologies, "--paths", "fit", *way]
    command += ["--repairs", "tfgpu.repairs", "--cases", *cases, "--json", tmp_path / "cells.json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-2000:]
    columns = json.loads((tmp_path / "cells.json").read_text())["cells"]
    cells = {(column, name): cell for column, part in columns.items() for name, cell in part.items()}
    assert len(cells) == (1 + len(topologies)) * len(cases)  # the reference is a column too
    assert not {key: (c["status"], c["message"]) for key, c in cells.items() if c["status"] != "equal"}
