"""The matrix of fine-tuning: what runs, what is kept, and what the page shows."""

import json
import subprocess
import sys

import pytest

from benchmarks import finetune_matrix as matrix
from benchmarks import measured

CELLS = [("gpt2", "LoRA", layout) for layout in matrix.LAYOUTS[:3]]
CHILD = """
import json, sys, time
cells, log, behavior = json.loads(sys.argv[1])
with open(log, "a") as file:
    def say(**line):
        print(json.dumps(line), file=file, flush=True)
    for cell in cells:
        if cell[2] == "2 workers" and behavior == "hangs":
            time.sleep(3600)
        say(begins=cell)
        if cell[2] == "2 workers":
            sys.exit(1)
        say(cell=cell, found={"weights": 1e-7, "logs": 2e-7})
"""


def test_cells_are_named_by_the_beginnings_of_their_parts():
    assert len(matrix.asked([])) == len(matrix.table()) == 8 * 4 * 6
    assert {cell[1] for cell in matrix.asked(["LoRA"])} == {"LoRA"}
    chosen = matrix.asked(["vit; int4; tensor", "bert; full; pipeline"])
    assert chosen == [("vit", "int4 + LoRA", "tensor 2"), ("bert", "full", "pipeline 2")]


def test_cells_of_pairs_that_have_not_run_come_first():
    every = matrix.table()
    found = matrix.in_turn(every, set())
    assert sorted(found) == sorted(every)
    wanted = {pair for cell in every for pair in matrix.pairs(cell)}
    assert {pair for cell in found[: 8 * 6] for pair in matrix.pairs(cell)} == wanted
    done = {matrix.name_of(cell) for cell in every if cell[0] != "vit"}
    assert {cell[2] for cell in matrix.in_turn(every[::-1], done)[:6]} == set(matrix.LAYOUTS)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "not run"),
        ({"weights": 2e-7, "logs": 3e-6}, "3e-06"),
        ({"weights": 2e-5, "logs": 0.0}, "**2e-05**"),
        ({"crashes": "KeyError"}, "**crashes**"),
        ({"refused": "No layer can be split (query: it is quantized)."}, f"[quantized]({matrix.LIMITS})"),
        ({"refused": "Something else."}, "refused"),
    ],
)
def test_a_cell_shows_its_difference_or_why_there_is_none(found, text):
    assert matrix.shown(found) == text


@pytest.mark.parametrize("behavior", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_what_ends_or_stands_still_is_a_result_and_the_rest_runs(behavior, monkeypatch, tmp_path):
    def start(cells, count, folder, logs):
        job = json.dumps([cells, str(logs / "0.jsonl"), behavior])
        return [subprocess.Popen([sys.executable, "-c", CHILD, job], start_new_session=True)]

    monkeypatch.setattr(matrix, "_start", start)
    results = matrix.Results(tmp_path / "kept.json")
    matrix._run_all(CELLS, 1, results, tmp_path, timeout_s=20 if behavior == "hangs" else 600)
    again = matrix.Results(tmp_path / "kept.json")
    again.read()
    assert [list(again.cells[matrix.name_of(cell)])[0] for cell in CELLS] == ["weights", behavior, "weights"]


def test_the_page_shows_what_is_kept():
    page = (measured.ROOT / "docs" / "measured" / "fine-tuning.md").read_text()
    results = matrix.Results(matrix.RESULTS)
    results.read()
    assert matrix.markdown(results.cells) in page


@pytest.mark.slow
def test_a_cell_runs_once(tmp_path):
    pytest.importorskip("keras_hub")
    where = ["--kept", str(tmp_path / "kept.json"), "--folder", str(tmp_path / "runs")]
    chosen = ["--only", "gpt2; LoRA; mirrored", "--only", "gpt2; LoRA; 2 workers"]
    command = [sys.executable, "-m", "benchmarks.finetune_matrix", *where, *chosen]
    for _ in range(2):
        done = subprocess.run(command, cwd=measured.ROOT, capture_output=True, text=True, timeout=1500, check=True)
    assert not done.stderr  # nothing was left to run
    cells = json.loads((tmp_path / "kept.json").read_text())["cells"]
    assert len(cells) == 2 and all(max(each["weights"], each["logs"]) < 1e-5 for each in cells.values())
