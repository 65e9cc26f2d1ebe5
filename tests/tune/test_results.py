import io
from pathlib import Path

import pytest
from rich.console import Console

from tfgpu.cli import tune
from tfgpu.tune.results import StudyResult, TrialResult, best_of, by_value


def trial(number, status="complete", value=None, val_loss=None, **more):
    settings = {"learning_rate": 10.0 ** -(number % 4 + 1), "global_batch": 32, "optimizer": "adam", "dropout": 0.25}
    return TrialResult(number, status, settings, value, val_loss, **more)


TRIALS = (
    trial(0, value=0.3, val_loss=1.0, epochs={1: 0.5, 2: 0.3}),
    trial(1, "diverged", reason="The loss became <nan>."),
    trial(2, value=0.1, val_loss=0.6, epochs={1: 0.2, 2: 0.1}),
    trial(3, "pruned", epochs={1: 0.6}, reason="worse than the others after epoch 1"),
    trial(4, value=0.1, val_loss=0.5, epochs={1: 0.4, 2: 0.1}),
)


def result(trials=TRIALS, **changes):
    facts = {
        "folder": Path("study"),
        "monitor": "val_error",
        "trials": trials,
        "best": best_of(trials),
        "own": trials[0],
        "recipe_file": Path("study/best.yaml"),
        "test_accuracy": 0.875,
        "own_test_accuracy": 0.625,
    }
    return StudyResult(**{**facts, **changes})


def test_among_equals_the_best_has_the_least_loss():
    assert best_of(TRIALS).number == 4
    assert best_of(TRIALS[:3]).number == 2
    assert best_of(TRIALS[1:2]) is None
    assert [one.number for one in by_value(TRIALS)] == [4, 2, 0, 1, 3]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_table_breaks_no_number_in_a_narrow_terminal(width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(tune._table(result(), width))
    lines = console.file.getvalue().splitlines()
    assert "trial" in lines[0] and "val_error" in lines[0]
    assert ("learning_rate  global_batch" in lines[0]) == (width == 80)
    assert all("10.00%" in line or "30.00%" in line for line in lines if line[10:11].isdigit())
    assert sum("best" in line for line in lines) == 1 and len(max(lines, key=len)) <= width
