"""A picture of a pipeline shows what ran when, and leaves the model unchanged."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.parallel import Mesh, picture, pipeline
from tfgpu.parallel.pipeline.schedule import Cell, needs

ROOT = Path(__file__).parents[2]
SLEEPING = """
import json, sys
import numpy as np, tensorflow as tf
import tfgpu
tfgpu.environment.set_logical_devices(4)
tf.config.threading.set_inter_op_parallelism_threads(16)
from benchmarks.pipeline import made
from tfgpu.parallel import picture
schedule, stages, microbatches, devices, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
model = made(schedule, stages, microbatches, devices, seconds=seconds)
rows = np.ones((2 * microbatches, 4), "float32")
cells = picture(model, (rows, rows), sys.argv[6])
print(json.dumps([[*one.cell, one.device, one.again, one.start, one.end] for one in cells]))
"""


def sleeping(path, schedule: str, stages: int, microbatches: int, devices: int, seconds: float) -> list:
    words = [sys.executable, "-c", SLEEPING, schedule, stages, microbatches, devices, seconds, path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, words)), cwd=path.parent, env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def idle_at_leisure(found: list, schedule: str, stages: int, devices: int) -> float:
    """The idle share of the recorded orders on a machine where a forward pass takes 1 and a backward pass 2."""
    ends, free, barrier, busy = {}, dict.fromkeys(range(devices), 0), 0, 0
    for stage, micro, back, device, again, *_ in sorted(found, key=lambda one: (one[4], one[5])):
        if again and not barrier:
            barrier = max(ends.values())  # the second pass begins with the losses of the first
        cell, length = Cell(stage, micro, back), 2 if back else 1
        first = schedule == "gpipe" and again and not back  # starts from what the first pass has kept
        ready = [ends[cell, False]] if first else [ends[need, again] for need in needs(cell, stages)]
        ends[cell, again] = free[device] = max([free[device], barrier if again else 0, *ready]) + length
        busy += length
    return 1 - busy / (devices * max(free.values()))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "devices", "idle"),
    # The idle share by hand: forward 1, again 1, back 2, each pass with its ramps; see docs/guides/parallel.md.
    [("1f1b", 4, 8, 4, 3 / 11), ("1f1b", 2, 8, 2, 1 / 9), ("interleaved", 8, 8, 4, 3 / 19), ("gpipe", 4, 8, 4, 9 / 41)],
)
def test_what_is_drawn_is_what_the_schedule_says(tmp_path, schedule, stages, microbatches, devices, idle):
    seconds = 0.1
    found = sleeping(tmp_path / "a.svg", schedule, stages, microbatches, devices, seconds)
    passes = Counter((stage, micro, back, again) for stage, micro, back, _, again, *_ in found)
    kinds = [(False, False), (False, True), (True, True)]  # backward, of the second pass
    assert passes == Counter({(s, m, *kind): 1 for s in range(stages) for m in range(microbatches) for kind in kinds})
    # When each has slept as long as it must, after its start; a busy machine may note its end later.
    slept = {
        (Cell(s, m, back), again): start + 0.95 * (2 if back else 1) * seconds
        for s, m, back, _, again, start, _ in found
    }
    latest = dict.fromkeys(range(devices), 0.0)
    for stage, micro, back, device, again, start, end in found:  # by their starts
        cell = Cell(stage, micro, back)
        assert device == stage % devices
        assert start >= latest[device], "two cells on one device at once"
        latest[device] = slept[cell, again]
        if schedule == "gpipe" and again and not back:
            assert start >= slept[cell, False]  # starts from what the first pass has kept
        else:
            assert all(start >= slept[need, again] for need in needs(cell, stages))
        assert end >= slept[cell, again]
    assert idle_at_leisure(found, schedule, stages, devices) == pytest.approx(idle)
    assert (tmp_path / "a.svg").read_text().count("<path") > len(found)


def mlp():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "relu", name="first")(inputs)
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(16, "relu", name="second")(x))
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(16, name="third")(x))
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(x))


def staged(**how):
    keras.utils.set_random_seed(0)
    model = pipeline(mlp(), 2, 3, cuts=["second"], **how)
    with model.distribute_strategy.scope():
        optimizer = keras.optimizers.AdamW(0.01, use_ema=True, gradient_accumulation_steps=2)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        jit_compile=False,
    )
    return model


RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(50, 8)).astype("float32"), RNG.integers(0, 4, 50), RNG.uniform(0.5, 2, 50).astype("float32")
MESH = Mesh(data=2, pipeline=2, devices=[f"CPU:{at}" for at in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"mesh": MESH, "schedule": "gpipe"},
        {"schedule": "gpipe", "recompute": False},
    ],
)
def test_a_picture_changes_nothing(tmp_path, how):
    batch = X[:14], Y[:14], W[:14]
    one, other = staged(**how), staged(**how)
    found = []
    for model, drawn in ((one, False), (other, True)):
        taken = []
        for part in range(3):
            if drawn:
                before = [v.numpy() for v in model.variables]
                cells = picture(model, batch, tmp_path / f"{part}.png")
                assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.variables, strict=False))
                kinds = Counter(cell.kind for cell in cells)
                assert kinds["forward"] and kinds["backward"]
                assert bool(kinds["forward again"]) == how.get("recompute", True)
            model.fit(X, Y, 14, sample_weight=W, shuffle=False, verbose=0, epochs=part + 1, initial_epoch=part)
            taken.append(model.evaluate(X, Y, verbose=0))
        found.append((taken, [v.numpy() for v in [*model.variables, *model.optimizer.variables]]))
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "path", "options", "message"),
    [
        (mlp, "a.png", {}, "is not a pipeline"),
        (lambda: pipeline(mlp(), 2, 3, cuts=["second"]), "a.png", {}, "is not compiled"),
        (staged, "a.pdf", {}, "`path` must end in .png, .svg, .html. Received: 'a.pdf'"),
        (staged, "a.png", {"steps": 0}, "`steps` must be a whole number"),
    ],
)
def test_bad_input(make, path, options, message):
    with pytest.raises(tfgpu.InputError, match=message):
        picture(make(), (X, Y), path, **options)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--model", "mlp", "--stages", "2", "--microbatches", "3", "-o", "a.html"], 0, "devices were idle"),
        (["--model", "mpl"], 2, "mlp"),
        (["--model", "mlp", "--stages", "2", "--cut", "dense77"], 2, "No layer is called 'dense77'"),
    ],
)
def test_the_command(tmp_path, words, code, told):
    command = [sys.executable, "-m", "tfgpu", "profile", "pipeline", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == code, done.stderr[-2000:]
    assert told in (done.stderr if code else done.stdout)
    if not code:
        page = (tmp_path / "a.html").read_text()
        assert page.startswith("<!doctype html>") and "2 stages, 3 micro-batches" in page and "stage 2" in page
