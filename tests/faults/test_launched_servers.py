"""`tfgpu launch --ps`: one script as chief, workers, server and evaluator, by `fit` and `Trainer`; and its deaths."""

import json
import os
import re
import runpy
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import tfgpu

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SERVED = Path(__file__).parent / "served.py"
ROWS, STEPS = 240, 30  # of an epoch
# Python runs this before anything else: a worker that dies before it has met the others.
DIES_FIRST = """
import json, os, signal
task = json.loads(os.environ.get("TF_CONFIG", '{"task": {}}'))["task"]
if "TFGPU_REJOIN" not in os.environ and task == {"type": "worker", "index": 1}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def served(launched, tmp_path):
    """Starts `served.py` with a chief, two workers and a parameter server."""

    def start(how, *options, epochs=3, slow=False, **more):
        folder = tmp_path / "run"
        folder.mkdir()
        if slow:
            (folder / "slow").touch()
        return launched(folder, how, "--ps", "1", *options, script=SERVED, epochs=epochs, **more)

    return start


@pytest.fixture(scope="module")
def twin():
    """The same model on one device, and its validation data."""
    parts = runpy.run_path(str(SERVED))
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        return parts["build"](), parts["validation"]()


def evaluated(twin, saved: Path, folder: Path) -> dict[str, float]:
    """What one device makes of one checkpoint."""
    model, data = twin
    shutil.copytree(saved, folder / saved.name)
    tfgpu.callbacks.Checkpoint(folder).restore(model)
    return model.evaluate(data, verbose=0, return_dict=True)


@pytest.mark.parametrize("how", ["fit", "trainer"])
def test_one_script_is_every_task_and_the_chief_has_the_weights(how, served, twin, tmp_path):
    group = served(how)
    found = group.finish()
    names = {name for name in ("chief0", "worker0", "worker1", "ps0") if group.events("start", 1, name)}
    assert len(names) == 4
    assert found["iterations"] == 3 * STEPS and list(found["rows"]) == [ROWS] * 3
    lines = [sum(f"worker {rank}| computes" in line for line in group.said.splitlines()) for rank in (0, 1)]
    assert sum(lines) == 3 * STEPS and min(lines) > 0, lines
    assert "chief   | computes" not in group.said
    # Its weights are those that it saved last, and evaluate as the workers evaluated them.
    values = evaluated(twin, group.folder / "saved" / "epoch-0003", tmp_path / "alone")
    assert values["loss"] == pytest.approx(found["val_loss"][-1], abs=1e-6)
    for mine, its in zip(twin[0].get_weights(), weights(found), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert found["val_loss"][-1] < found["val_loss"][0] and found["val_accuracy"][-1] > 0.9
    assert not group.left()


def weights(found: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [found[f"arr_{at}"] for at in range(sum(name.startswith("arr_") for name in found))]


def test_the_evaluator_says_what_one_device_says_of_each_checkpoint_and_ends_with_the_training(served, twin, tmp_path):
    group = served("fit", "--evaluator", "--grace-period", "3600")
    found = group.finish()
    rows = [json.loads(line) for line in (group.folder / "saved" / "evaluations.jsonl").read_text().splitlines()]
    epochs = [row.pop("epoch") for row in rows]
    assert epochs == sorted(set(epochs)) and epochs[-1] == 3
    for row, epoch in zip(rows, epochs, strict=True):
        name = row.pop("checkpoint")
        assert row == pytest.approx(evaluated(twin, group.folder / "saved" / name, tmp_path / name), abs=1e-6)
        assert row["loss"] == pytest.approx(found["val_loss"][epoch - 1], abs=1e-6)
    # By itself, and not at the end of the grace.
    (ended, _), (evaluates, _) = group.event("end"), group.event("evaluated", 1, "evaluator0")
    print(json.dumps({"evaluated": epochs, "seconds after the training": round(evaluates - ended, 1)}))
    assert not group.left()


def test_a_killed_worker_is_started_again_alone_and_every_example_counts_once(served):
    group = served("fit", "--max-restarts", "1", epochs=10, slow=True)
    middle_at, _ = group.event("middle", 1, "chief0")
    group.said_at("worker 1| computes", after=middle_at)
    os.kill(group.event("start", 1, "worker1")[1], signal.SIGKILL)  # in the middle of a closure
    said_at = group.said_at("worker 1: killed by SIGKILL. It alone is restarted; 1 of 1 restarts used.")
    # While the data is slow, the worker comes back and computes.
    back_at, _ = group.event("start", 1, "worker1", after=said_at)
    again_at = group.said_at("worker 1| computes", after=back_at)
    (group.folder / "slow").unlink()
    found = group.finish()
    assert len(group.events("start", 1, "worker1")) == 2
    assert [len(group.events("start", rank=name)) for name in ("chief0", "worker0", "ps0")] == [1, 1, 1]
    twice = sum(map(int, re.findall(r"before their closures were done: (\d+)\.", group.said)))
    print(json.dumps({"computes again after s": round(again_at - said_at, 1), "updates that came twice": twice}))
    assert found["iterations"] == 10 * STEPS + twice
    assert list(found["rows"]) == [ROWS] * 10
    assert found["loss"][-1] < 0.5 * found["loss"][0]
    assert not group.left()


def test_a_worker_that_dies_before_it_has_met_the_others_is_started_again_alone(served, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DIES_FIRST)
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    group = served("fit", "--max-restarts", "1", environ={"PYTHONPATH": path})
    found = group.finish()
    assert "worker 1: killed by SIGKILL. It alone is restarted; 1 of 1 restarts used." in group.said
    assert "Attempt 2 starts" not in group.said and "worker 1| computes" in group.said
    assert found["iterations"] == 3 * STEPS and list(found["rows"]) == [ROWS] * 3


@pytest.mark.parametrize(("victim", "words"), [("ps0", "ps 0: killed by SIGKILL"), ("chief0", "chief: killed by")])
def test_a_killed_server_or_chief_restarts_all_from_the_checkpoint(victim, words, served):
    group = served("fit", "--max-restarts", "1", epochs=4, slow=True)
    group.event("middle", 1, "chief0")
    while not (group.folder / "saved" / "epoch-0001" / "facts.json").is_file():
        assert group.process.poll() is None, group.said
    os.kill(group.event("start", 1, victim)[1], signal.SIGKILL)
    group.said_at(words)
    group.said_at("Attempt 2 starts in 1 s (1 of 1 restarts used).")
    found = group.finish()
    assert not group.events("epoch 0", attempt=2) and len(group.events("epoch 1", attempt=2)) == 1
    assert found["iterations"] == 4 * STEPS and list(found["rows"]) == [ROWS] * 4
    assert len(found["loss"]) == 4 and found["loss"][-1] < 0.5 * found["loss"][0]
    assert not group.left()
