"""`benchmarks.incremental` with one seed: plain fine-tuning forgets, and replay does not."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import incremental  # noqa: E402


@pytest.mark.slow
def test_five_tasks_of_one_seed(tmp_path):
    output = tmp_path / "digits.json"
    methods = ["fine-tuning", "replay, reservoir", "replay, balanced", "joint training"]
    incremental.main(seeds=1, epochs=20, memory=200, only=methods, output=output)
    runs = json.loads(output.read_text())["runs"]
    average = {name: incremental.summary(runs[name], "class")["average"][0] for name in methods}
    assert average["fine-tuning"] < 0.25
    assert min(average["replay, reservoir"], average["replay, balanced"]) >= 0.9
    assert average["joint training"] >= max(average.values()) - 0.01
    assert output.with_suffix(".svg").exists()


def test_the_table_by_hand():
    rows = [[1.0, 0.0], [0.5, 0.9]]
    results = {"runs": {"x": [{"class": rows, "task": rows}, {"class": rows, "task": rows}]}}
    line = incremental.table(results)[-1]
    assert line == "| x | 100.0% | 70.0% | 70.0% (0.0%) | 70.0% | 50.0% (0.0%) | 70.0% (0.0%) |"
