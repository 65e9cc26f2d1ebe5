"""A slice of the equivalence matrix: the cases that were hardest to make equal, in real processes."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = {path.stem for path in HERE.glob("*.py")}
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


@pytest.fixture
def run(monkeypatch):
    """The module that runs the matrix: imported here, where TensorFlow has started, and not in one more process."""
    monkeypatch.syspath_prepend(str(HERE))
    own = {name: sys.modules.pop(name) for name in NAMES & sys.modules.keys()}
    yield importlib.import_module("run")
    for name in NAMES & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(own)


@pytest.mark.processes
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("topologies", "cases", "gpu_way"),
    [
        pytest.param(["workers-2x1"], CASES[:2], False, marks=pytest.mark.slow),
        pytest.param(["mirrored-4", "workers-2x1"], CASES, False, marks=pytest.mark.slow),
        pytest.param(["mirrored-2", "workers-2x1"], CASES, True, marks=pytest.mark.slow),
    ],
    ids=["few", "all", "gpu-way"],
)
def test_replicas_and_workers_learn_what_one_device_learns(run, tmp_path, topologies, cases, gpu_way):
    how = dict(names=cases, topologies=topologies, paths=["fit"], repairs=["tfgpu.repairs"], gpu_way=gpu_way)
    columns, _ = run.measure(**how, folder=tmp_path)
    cells = {(column, name): cell for column, part in columns.items() for name, cell in part.items()}
    assert len(cells) == (1 + len(topologies)) * len(cases)  # the reference is a column too
    assert not {key: (cell.status, cell.message) for key, cell in cells.items() if cell.status != "equal"}
