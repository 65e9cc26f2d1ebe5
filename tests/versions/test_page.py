"""What `make versions` says of a corner, from results as a corner gives them. The corners themselves: `run.py`."""

import importlib
import sys
from types import SimpleNamespace

import pytest

FOUND = {
    "versions": {"TensorFlow": "2.20.0", "Keras": "3.13.2", "NumPy": "2.5.5", "Python": "3.13.0"},
    "repairs": 2,
    "in force": ["local-losses", "no-rows"],
    "changed": [],
    "pip changes": [],
    "probes": {"local-losses": True, "no-rows": False},
    "cells": {"jit": "equal", "dropout": "equal"},
}


@pytest.fixture
def run(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    for name in ("run", "corners"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run")
    for name in ("run", "corners"):
        sys.modules.pop(name, None)


def test_a_corner_without_problems(run):
    assert run.faults(FOUND) == []
    (corner,) = [each for each in run.CORNERS if each.name == "colab"]
    assert run.row(corner, FOUND) == (
        "| Colab, Kaggle | 2.20.0 | 3.13.2 | 2.5.5 | 3.13.0 | 2 repairs | nothing | 1 of 2 | 2 of 2 |"
    )
    assert "No case that ran differs." in run.page({"colab": FOUND})


def test_invalid_input_is_named(run):
    wrong = {
        **FOUND,
        "changed": ["nn.conv"],
        "pip changes": ["numpy"],
        "probes": {"no-rows": None},
        "cells": {"jit": "differs", "dropout": "crashes TypeError"},
    }
    assert run.faults(wrong) == [
        "nn.conv has a source that was not tried",
        "pip install would change numpy",
        "the probe no-rows gave no answer",
        "jit differs",
        "dropout crashes TypeError",
    ]
    assert "- Colab, Kaggle: jit differs" in run.page({"colab": wrong})


def test_a_repair_whose_fault_is_not_there_is_named(run):
    wrong = {**FOUND, "probes": {"local-losses": False, "no-rows": False, "activity-sums": False}}
    assert run.faults(wrong) == ["the repair local-losses is in force, but its probe finds no fault"]


def test_lines_on_corners_that_were_not_tried_are_kept(run):
    wrong = {**FOUND, "cells": {"jit": "differs"}}
    before = run.page({"oldest": FOUND, "colab": wrong, "newest": wrong})
    after = run.page({"colab": FOUND}, before)
    assert after == run.page({"oldest": FOUND, "colab": FOUND, "newest": wrong})
    assert after.count("| 2.20.0 |") == 3 and after.count("- next release: jit differs") == 1
    assert run.page({"newest": FOUND}, after) == run.page({name: FOUND for name in ("oldest", "colab", "newest")})


def test_a_corner_that_fails_to_start(run):
    failed = {"error": "pip install: ERROR\nNo matching distribution"}
    assert run.faults(failed) == [failed["error"]]
    (corner,) = [each for each in run.CORNERS if each.name == "colab"]
    assert "| **No matching distribution** |" in run.row(corner, failed)
    assert "- Colab, Kaggle: No matching distribution\n" in run.page({"colab": failed})


def test_a_corner_without_its_python_fails_the_check_and_keeps_its_line(run, monkeypatch, tmp_path, capsys):
    page = tmp_path / "versions.md"
    page.write_text(before := run.page({"colab": FOUND}))
    monkeypatch.setattr(run, "find_python", lambda version: None)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--corners", "colab", "--check", "--write", str(page)])
    with pytest.raises(SystemExit, match="1"):
        run.main()
    assert page.read_text() == before and "there is no Python 3.13 here" in capsys.readouterr().out


def test_tfgpu_brings_what_a_corner_does_not_choose(run):
    corners = importlib.import_module("corners")
    needed = corners.requirements()
    assert any(each.startswith("psutil") for each in needed)
    assert not any(each.startswith(("tensorflow", "keras", "numpy")) for each in needed)


FAILS = "def test_it(): assert False, 'by itself too'"
FAILS_ONCE = """
from pathlib import Path
def test_it():
    again = Path("mark").exists()
    Path("mark").touch()
    assert again
"""


def test_the_fast_tests_fail_where_one_fails_twice(run, monkeypatch, tmp_path):
    """In a tree of its own."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "TESTED", ["core"])
    monkeypatch.setattr(run, "add_pytest", lambda corner: None)
    corner = SimpleNamespace(interpreter=sys.executable, folder=tmp_path / "corner")
    (tmp_path / "tests" / "core").mkdir(parents=True)
    for name, text in {"a": FAILS_ONCE, "b": FAILS}.items():
        (tmp_path / "tests" / "core" / f"test_{name}.py").write_text(text)
    with pytest.raises(RuntimeError, match="(?s)by itself too.*1 failed, 1 passed"):
        run.fast_tests(corner, 1, 1)


def test_folders_of_the_fast_tests_are_there(run):
    assert [name for name in run.TESTED if not any((run.ROOT / "tests" / name).rglob("test_*.py"))] == []
