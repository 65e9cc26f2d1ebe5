"""Planted faults are found in real runs, and none in healthy runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import planted
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError, MachineError
from tfgpu.measure import profile
from tfgpu.measure.profiling import session as targets
from tfgpu.recipes import ready

ROOT = Path(__file__).parents[2]

THREE_FAULTS = """
import sys, time
import keras, numpy as np, tensorflow as tf

def augment(x, y):
    return tf.numpy_function(lambda rows: (time.sleep(0.005), rows)[1], [x], tf.float32), y

def shaped(x, y):
    return tf.ensure_shape(x, [8]), y

data = tf.data.Dataset.from_tensor_slices((np.ones((256, 8), "float32"), np.ones((256, 1), "float32")))
data = data.shuffle(64).map(augment).map(shaped).batch(8).repeat()
weights = tf.Variable(tf.ones([8, 1]))

@tf.function
def step(x, y, epoch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weights - y) ** 2) + 0.0 * epoch
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
    return loss

for number, (x, y) in enumerate(data.take(int(sys.argv[1]))):
    loss = step(x, y, number // 3)
    print("loss", float(loss))
print("the end")
"""


def run(folder, script, *words, options=(), code=0, timeout=550):
    """Runs `tfgpu profile` on a script; returns its stdout and stderr."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "tfgpu", "profile", *options, "script.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Profiles a script with three faults; returns the folder, the JSON and the other output."""
    folder = tmp_path_factory.mktemp("three")
    out, told = run(folder, THREE_FAULTS, "60", options=["--json"])
    return folder, json.loads(out), told


@pytest.mark.slow
@pytest.mark.processes
def test_three_planted_faults_are_found_by_name_and_place(three):
    folder, found, told = three
    faults = {finding["name"]: finding for finding in found["findings"]}
    assert faults.keys() >= {"slow_map", "host_read", "retracing"}
    assert faults["slow_map"]["where"] == "augment (script.py:5)" and "PyFunc" in faults["slow_map"]["seen"]
    assert "dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)" in faults["slow_map"]["knob"]
    line = 1 + next(at for at, text in enumerate(THREE_FAULTS.splitlines()) if "float(loss)" in text)
    assert faults["host_read"]["where"] == f"script.py:{line}"
    assert faults["host_read"]["figures"]["reads_a_step"] == pytest.approx(1, abs=0.2)
    assert (faults["retracing"]["where"], faults["retracing"]["figures"]["argument"]) == ("step", "epoch")
    assert "`epoch` changes: 0, 1, 2" in faults["retracing"]["seen"]
    assert not faults.keys() & {"eager_step", "unsharded_input", "recompiling"}
    assert found["batch"] == 8 and found["steps_marked_by"] == "step" and found["verdict"] != "unknown"
    assert not found["device_trace"] and found["tensor_core_share"] is None
    assert "loss" in told and "the end" not in told  # The script's own words; it ends when there is enough.


@pytest.mark.slow
@pytest.mark.processes
def test_the_files_lie_in_the_folder(three):
    folder = three[0] / "profile"
    assert json.loads((folder / "verdict.json").read_text()) == three[1]
    assert "retracing at step" in (folder / "verdict.txt").read_text()
    again = targets.read_trace(folder, three[0] / "again")
    named = {finding.name: finding.where for finding in again.findings}
    assert named.keys() == {finding["name"] for finding in three[1]["findings"]}
    assert named["slow_map"] == "MapDataset:2"  # Names of functions are not in the trace.


@pytest.mark.sample("fit")
@pytest.mark.parametrize("way", ["fit", "Trainer"])
def test_the_steps_of_a_training_are_found(tmp_path, way):
    with tfgpu.strategy("one_device").scope():
        small = planted.model(8, 2)
    with profile(tmp_path, seconds=0.1, ends=True) as session:
        if way == "fit":
            small.fit(planted.rows(4096, 2), epochs=40, verbose=0)
        else:
            tfgpu.Trainer(small, steps_per_call=20).fit(planted.rows(4096, 2), epochs=40, verbose=0)
    report = session.report
    found = {finding.name: finding for finding in report.findings}
    assert report.batch == 2 and report.window.marked_by == "tfgpu" and report.verdict != "unknown"
    assert not found.keys() & {"host_read", "retracing", "eager_step", "slow_map", "unsharded_input"}
    if way == "Trainer":
        assert report.window.steps == 20 * len(report.window.inside)


def test_whole_batches_for_all_replicas_are_found(tmp_path):
    strategy = tfgpu.strategy("mirrored", devices=2)
    weights = tf.ones([64, 64])

    @tf.function
    def step(x):
        return strategy.run(lambda x: tf.reduce_sum(x @ weights), args=(x,))

    with profile(tmp_path, seconds=0.2) as session:
        for x in tf.data.Dataset.from_tensors(np.ones((32, 64), "float32")).repeat(40):
            step(x)
    (found,) = [finding for finding in session.report.findings if finding.name == "unsharded_input"]
    assert found.where.startswith("test_profile.py:") and found.share == 0.5
    assert "experimental_distribute_dataset" in found.knob


def test_sharded_rows_are_no_fault(tmp_path):
    strategy = tfgpu.strategy("mirrored", devices=2)
    batches = tf.data.Dataset.from_tensors(np.ones((32, 64), "float32")).repeat(40)

    @tf.function
    def step(x):
        return strategy.run(lambda x: tf.reduce_sum(x), args=(x,))

    with profile(tmp_path, seconds=0.2) as session:
        for x in strategy.experimental_distribute_dataset(batches):
            step(x)
    assert "unsharded_input" not in [finding.name for finding in session.report.findings]


def test_an_eager_step_is_found(tmp_path):
    report = planted.eager_step(tmp_path)
    assert "eager_step" in [finding.name for finding in report.findings] and report.window.marked_by == "batches"


def test_nothing_stays_patched(tmp_path):
    call, gradient = type(tf.function(lambda: None)).__call__, tf.GradientTape.gradient
    with pytest.raises(ZeroDivisionError), profile(tmp_path):
        assert tf.GradientTape.gradient is not gradient
        raise ZeroDivisionError
    assert type(tf.function(lambda: None)).__call__ is call and tf.GradientTape.gradient is gradient


def test_a_second_profiler_is_refused(tmp_path):
    step = tf.function(lambda x: x + 1)
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with pytest.raises(MachineError, match="already running"), profile(tmp_path, skip=0):
            step(tf.ones([2]))
    finally:
        tf.profiler.experimental.stop()


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"calls": 1}, {"seconds": 0}])
def test_wrong_numbers_are_refused(wrong, tmp_path):
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must be "), profile(tmp_path, **wrong):
        pass


@pytest.mark.parametrize(
    "words, told",
    [
        (["none.py"], "There is no 'none.py'. Give a script (.py), a recipe (.yaml, or one of cifar10, digits,"),
        (["digit"], "Unknown target 'digit'. Did you mean 'digits'? Choices: cifar10, digits, finetune-text,"),
        (["runs/digits"], "There is no 'runs/digits'"),
        (["-o", "/proc/nothing", "digits"], "Cannot write in '/proc/nothing'"),
        (["digits", "--epochs", "3"], "Received: --epochs 3. Put the flags of `tfgpu profile` before the target"),
        (["--whole", "digits"], "'digits' is not a script, so it takes no arguments and no --whole"),
        (["--modle", "mlp"], "No such option: --modle"),
        (["--skip", "1"], "Missing argument 'TARGET'"),
        ([str(ROOT), "--epochs", "3"], "is not a script, so it takes no arguments"),
        (["--calls", "5", str(ROOT)], "not with a recorded trace"),
        (["--skip", "0", str(ROOT)], "not with a recorded trace"),
        (["-o", "out", str(ROOT / "docs" / "guides" / "parallel")], "There is no trace in"),
    ],
)
def test_the_command_refuses_what_it_would_ignore(words, told, capsys):
    from tfgpu import cli

    with pytest.raises(SystemExit) as end:
        cli.main(["profile", *words])
    assert end.value.code == 2 and told in " ".join(capsys.readouterr().err.split())


TOO_FEW = "import tensorflow as tf\nstep = tf.function(lambda x: x)\nfor _ in range(2): step(tf.ones([2]))"


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_with_too_few_calls_is_told_so(tmp_path):
    assert "It called <lambda> 2 times. Use --skip 0" in run(tmp_path, TOO_FEW, code=2)[1]


HEALTHY = """
import keras, numpy as np, tensorflow as tf
layers = [keras.layers.Dense(768, "relu") for _ in range(3)]
model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)
data = tf.data.Dataset.from_tensor_slices((np.ones((4096, 256), "float32"), np.ones((4096, 1), "float32")))
mean = keras.metrics.Mean()

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    mean.update_state(loss)

for number, (x, y) in enumerate(data.shuffle(512).repeat().batch(256).prefetch(4).take(40)):
    step(x, y)
    if number % 20 == 0:
        print(float(mean.result()))
print("the end")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_loop_runs_to_its_end_where_it_is_asked_to(tmp_path):
    out, _ = run(tmp_path, HEALTHY, options=["--whole", "-o", "out"])
    assert "the end" in out and "Verdict: " in out
    assert (tmp_path / "out" / "profile.html").exists()


RECOMPILING = """
import numpy as np, tensorflow as tf
step = tf.function(lambda x: tf.reduce_sum(tf.nn.relu(x @ tf.ones([64, 64]))), jit_compile=True, reduce_retracing=True)
for number in range(40):
    step(tf.ones([4 + number, 64]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_xla_that_compiles_for_each_shape_is_found(tmp_path):
    found = json.loads(run(tmp_path, RECOMPILING, options=["--json"])[0])
    faults = {finding["name"]: finding for finding in found["findings"]}
    assert faults["recompiling"]["figures"]["times"] > 3 and found["verdict"] == "compile-bound"


@pytest.mark.slow
@pytest.mark.processes
def test_a_recipe_is_profiled_and_leaves_no_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: mlp\nglobal_batch: 16\nstrategy: one_device\n")
    command = [sys.executable, "-m", "tfgpu", "profile", "--json", "recipe.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["steps_marked_by"] == "tfgpu" and found["batch"] == 16 and found["verdict"] != "unknown"
    assert sorted(os.listdir(tmp_path)) == ["profile", "recipe.yaml"]


def test_a_ready_recipe_is_a_target_by_its_name_where_nothing_else_has_it(tmp_path, monkeypatch):
    from tfgpu.cli import profile as command

    monkeypatch.chdir(tmp_path)
    assert command._path("digits") == ready.path("digits")
    (tmp_path / "digits").mkdir()
    assert command._path("digits") == ready.path("digits")  # a folder of data is nothing to profile
    trace = tmp_path / "digits" / "plugins" / "host.xplane.pb"
    trace.parent.mkdir()
    trace.touch()
    assert command._path("digits") == Path("digits")
    (tmp_path / "text").touch()
    assert command._path("text") == Path("text")


@pytest.mark.slow
@pytest.mark.processes
def test_a_ready_recipe_is_profiled_by_its_name(tmp_path):
    command = [sys.executable, "-m", "tfgpu", "profile", "--json", "digits"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["steps_marked_by"] == "tfgpu" and found["verdict"] != "unknown"


UNSHARDED = """
import dataclasses, json, os, pathlib, sys, time
import numpy as np, tensorflow as tf, tfgpu
from tfgpu.measure import profile
strategy = tfgpu.strategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
rows = tf.data.Dataset.from_tensor_slices(np.ones((512, 8), "float32"))

def make(context):
    data = rows.shard(2, context.input_pipeline_id) if sys.argv[1] == "sharded" else rows
    return data.map(lambda x: x * 2).repeat().batch(8)

@tf.function
def step(x):
    return strategy.reduce("sum", strategy.run(tf.reduce_sum, args=(x,)), axis=None)

with profile(f"{sys.argv[2]}/{rank}", seconds=0.3) as session:
    for number, x in zip(range(60), strategy.distribute_datasets_from_function(make)):
        step(x)
print(json.dumps([dataclasses.asdict(finding) for finding in session.report.findings]), flush=True)


def wait_for(name):
    for _ in range(600):
        if os.path.exists(f"{sys.argv[2]}/{name}"):
            return
        time.sleep(0.1)


pathlib.Path(f"{sys.argv[2]}/done{rank}").touch()
wait_for(f"done{1 - rank}")
if rank == 0:
    wait_for("left")  # Worker 0 serves the cluster: who is left without it dies of that.
pathlib.Path(f"{sys.argv[2]}/left").touch()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", ["sharded", "whole"])
def test_input_that_workers_do_not_shard_is_found(tmp_path, together, how):
    answers = together(UNSHARDED, {"worker": 2}, how, str(tmp_path))
    for findings in answers.values():
        names = [finding["name"] for finding in findings]
        assert ("unsharded_input" in names) == (how == "whole"), names
