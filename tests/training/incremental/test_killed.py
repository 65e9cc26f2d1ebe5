"""Training on several tasks that is killed anywhere and restarted ends with the same bytes as an uninterrupted one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint, Tasks
from tfgpu.checkpoint.storage import STATE, found
from tfgpu.training import incremental

SCRIPT = Path(__file__).with_name("killed_run.py")
ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = np.arange(24) % 3


def run(folder, how, replicas, where=None):
    command = [sys.executable, str(SCRIPT), str(folder), how, str(replicas), *([where] if where else [])]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550)
    signals = {None: 0, "SIGKILL": -signal.SIGKILL, "SIGTERM": 75}
    assert done.returncode == signals[where and where.split(":")[0]], (where, done.stderr[-3000:])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("how", "places"),
    [
        (
            "tasks",
            ["SIGTERM:1:step-7", "SIGKILL:1:step-5", "SIGKILL:1:in-add", "SIGKILL:1:in-end", "SIGKILL:2:step-10"],
        ),
        ("online", ["SIGKILL:1:step-15", "SIGTERM:2:step-9"]),
        ("stream", ["SIGKILL:1:step-8", "SIGTERM:1:step-3", "SIGKILL:1:before-end", "SIGKILL:2:step-3"]),
    ],
)
def test_ends_as_one_that_was_not_killed(tmp_path, how, places, replicas):
    run(tmp_path / "whole", how, replicas)
    for place in places:
        run(tmp_path / "cut", how, replicas, place)
    run(tmp_path / "cut", how, replicas)
    whole, cut = np.load(tmp_path / "whole.npz"), np.load(tmp_path / "cut.npz")
    assert whole.files == cut.files
    assert all(whole[name].tobytes() == cut[name].tobytes() for name in whole.files)


@pytest.fixture(scope="module")
def by_workers():
    """Runs the script on two workers under a restarting launcher; returns each one's results."""

    def run(folder, *where):
        words = ["launch", "-n", "2", "--no-logs", "--max-restarts", "2", "--startup-timeout", "120", str(SCRIPT)]
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tfgpu", *words, str(folder), "tasks", "workers", *where]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, (where, done.stdout[-2000:], done.stderr[-3000:])
        assert Path(f"{folder}.died").exists() == bool(where)
        return [np.load(f"{folder}-{rank}.npz") for rank in (0, 1)]

    return run


@pytest.fixture(scope="module")
def not_killed(by_workers, tmp_path_factory):
    return by_workers(tmp_path_factory.mktemp("workers") / "whole")[0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "where",
    ["SIGKILL:1:step-5:0", "SIGKILL:2:step-7:1", "SIGKILL:1:in-end:0", "SIGKILL:1:in-add:1", "SIGTERM:1:step-7:1"],
)
def test_two_workers_of_which_one_is_killed_end_as_if_none_was(tmp_path, by_workers, not_killed, where):
    for each in by_workers(tmp_path / "cut", where):
        assert not_killed.files == each.files
        assert all(not_killed[name].tobytes() == each[name].tobytes() for name in each.files)


def model_of(rate=0.01, build=True):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, "relu", name="body"), keras.layers.Dropout(0.3), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((4,)) if build else None, *layers][not build :])
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(folder, model, *, tasks=3, stop=None, keep=2, penalized=False):
    replay, elastic = incremental.Replay(9, seed=2), incremental.ElasticWeights(3.0)
    known = Tasks(folder, remember={"replay": replay, "elastic": elastic}, keep=keep)
    for task in range(known.begin(model), tasks):
        rows = slice(task * 8, task * 8 + 8)
        data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(4)
        model.fit(replay.mix(data), epochs=2, verbose=0, callbacks=[known.checkpoint()])
        replay.add(X[rows], Y[rows])
        if penalized:
            elastic.add(model, X[rows], Y[rows], examples=2)
        if task == stop:
            raise InterruptedError
        known.end(model, {"task": task})
    return known, replay, elastic


def same(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one.get_weights(), other.get_weights(), strict=True))


@pytest.mark.slow
def test_resumes_the_task_that_was_running(tmp_path):
    whole, again = model_of(), model_of()
    _, replay, elastic = train(tmp_path / "whole", whole, tasks=2, penalized=True)
    with pytest.raises(InterruptedError):
        train(tmp_path / "cut", model_of(), stop=1, penalized=True)
    np.random.seed(77)  # what a new process has, maybe
    known, memory, penalty = train(tmp_path / "cut", again, tasks=2, penalized=True)
    assert same(whole, again) and known.done == 2
    assert [row["task"] for row in known.logs] == [0, 1]
    assert np.array_equal(replay.arrays[0], memory.arrays[0]) and replay.seen == memory.seen == 16
    assert float(elastic.penalty(whole)) == float(penalty.penalty(again)) > 0
    assert penalty.tasks == 2
    train(tmp_path / "cut", later := model_of(), tasks=2)  # months later: all that was
    assert same(whole, later) and len(later.losses) == 4


def test_a_damaged_start_falls_back_to_the_previous_one(tmp_path, caplog):
    train(tmp_path / "run", whole := model_of())
    newest = found(tmp_path / "run" / "begun")[0]
    content = bytearray((newest / STATE).read_bytes())
    content[-1] ^= 1
    (newest / STATE).write_bytes(content)
    known, replay, _ = train(tmp_path / "run", again := model_of())
    assert "epoch-0003 is damaged" in caplog.text
    assert same(whole, again) and known.done == 3 and replay.seen == 24


@pytest.mark.slow
def test_keeps_the_newest_alone(tmp_path):
    train(tmp_path / "run", model_of(), keep=1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["begun"]
    train(tmp_path / "two", model_of(), keep=2)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["begun", "task-0002"]


def test_what_a_task_has_set_is_there_in_the_next(tmp_path):
    model = model_of()
    tasks = Tasks(tmp_path / "run")
    assert tasks.begin(model) == 0
    incremental.freeze(model, "body")
    incremental.rewarm(model, steps=9)
    model.fit(X, Y, verbose=0, callbacks=[tasks.checkpoint()], batch_size=8, shuffle=False)  # 3 updates
    tasks.end(model)
    again = model_of()
    assert Tasks(tmp_path / "run").begin(again) == 1
    assert len(again.trainable_variables) == 2 and not again.get_layer("body").trainable
    assert float(again.optimizer.learning_rate) == pytest.approx(0.01 * 4 / 10)
    assert float(again.optimizer.learning_rate) == float(model.optimizer.learning_rate)


def test_a_folder_of_examples_is_made_as_it_was(tmp_path):
    def made():
        return incremental.Replay(6, seed=1, folder=tmp_path / "kept")

    one = made()
    first = Tasks(tmp_path / "run", remember={"replay": one})
    first.begin(model := model_of())
    one.add(X[:12], Y[:12])
    first.end(model)
    before = np.array(one.arrays[0])
    one.add(X[12:], Y[12:])  # of a task that is killed
    again = made()
    Tasks(tmp_path / "run", remember={"replay": again}).begin(model_of())
    assert again.seen == 12 and np.array_equal(again.arrays[0], before)


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state(self):
        return {"value": self.value}

    def put(self, state, model):
        self.value = state["value"]


def test_anything_with_a_state_is_remembered(tmp_path):
    counter = Counter(5)
    model_of().fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path / "run", remember={"counter": counter})])
    other = Counter()
    assert Checkpoint(tmp_path / "run", remember={"counter": other}).restore(model_of()).epoch == 1
    assert other.value == 5


@pytest.mark.slow
def test_invalid_input_is_named(tmp_path, caplog):
    for wrong in ([Counter()], {"a": 3}, {1: Counter()}):
        with pytest.raises(tfgpu.InputError, match="rememb"):
            Tasks(tmp_path / "a", remember=wrong)
    with pytest.raises(tfgpu.InputError, match="state of 'a' contains a value of type `Counter`"):
        Tasks(tmp_path / "b", remember={"a": Counter(Counter())}).begin(model_of())
    with pytest.raises(tfgpu.InputError, match="`keep`"):
        Tasks(tmp_path / "a", keep=0)
    tasks = Tasks(tmp_path / "c")
    for early in (tasks.checkpoint, lambda: tasks.end(model_of())):
        with pytest.raises(tfgpu.InputError, match="No task has begun"):
            early()
    with pytest.raises(tfgpu.InputError, match="built and compiled"):
        tasks.begin(model_of(build=False))
    tasks.begin(model_of())
    tasks.checkpoint()
    for name in ("fit", "../up", ""):
        with pytest.raises(tfgpu.InputError, match="needs its own name"):
            tasks.checkpoint(name)
    with pytest.raises(tfgpu.InputError, match="start of the script"):
        tasks.begin(model_of())
    with pytest.raises(tfgpu.InputError, match="made without 'counter'"):
        Tasks(tmp_path / "c", remember={"counter": Counter()}).begin(model_of())
    Tasks(tmp_path / "d", remember={"counter": Counter()}).begin(model_of())
    Tasks(tmp_path / "d").begin(model_of())
    assert "has the state of 'counter', which this run does not have" in caplog.text
    with pytest.raises(tfgpu.InputError, match=r"does not fit this model: .* has shape"):
        Tasks(tmp_path / "c").begin(incremental.grow(model_of(), 5))
    model_of().fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path / "e" / "begun")])
    with pytest.raises(tfgpu.InputError, match="was not saved by Tasks"):
        Tasks(tmp_path / "e").begin(model_of())
    replay, stream = incremental.Replay(4), [(X, Y)]
    settings = {"window": 8, "global_batch": 4, "verbose": 0, "replay": replay}
    for given, match in (
        ({"tasks": Tasks(tmp_path / "f")}, "must save the replay memory"),
        ({"tasks": Tasks(tmp_path / "f", remember={"r": replay}), "skip": 1}, "skip=1 too"),
        ({"callbacks": [Checkpoint(tmp_path / "g")]}, "supports a single `fit`"),
    ):
        with pytest.raises(tfgpu.InputError, match=match):
            incremental.fit_stream(model_of(), stream, **settings, **given)
