"""Every notebook runs from top to bottom; none is left out. The site shows what they print (`make docs`)."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

FILE = Path(__file__).parents[1] / "docs" / "site" / "notebooks.py"
SPEC = importlib.util.spec_from_file_location("site_notebooks", FILE)
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)
CASES = [pytest.param(path, id=path.stem, marks=pytest.mark.slow) for path in notebooks.NOTEBOOKS]


def test_there_are_notebooks():
    assert len(CASES) >= 2


@pytest.mark.timeout(660)
@pytest.mark.parametrize("path", CASES)
def test_notebook_runs(path, tmp_path):
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), "commit without outputs"
    ran = nbformat.read(notebooks.run(path, folder=tmp_path), as_version=4)
    pictures = [each for cell in ran.cells for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]
    assert pictures, "a notebook has pictures"
