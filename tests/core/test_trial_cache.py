"""What trials have found is kept: a second run of the same code makes none, and changed code makes one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.core.row_mixing import verdicts
from tfgpu.core.row_mixing.trials import layer_trial, loss_trial, metric_trial, part_trial
from tfgpu.core.trial_cache import code_digest, store

ROOT = Path(__file__).parent.parent.parent
X, Y = np.random.default_rng(0).random((8, 5), "float32"), np.ones((8, 3), "float32")
NUMBER = 3


def helper(x):
    return x + NUMBER


def made(scale=1.0, *, power=2):
    """A model of the user's own pieces; called again it makes them anew, of the same code."""

    class Scaled(keras.layers.Layer):
        def call(self, x):
            return scale * x

    class Sum(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="sum")
            self.total = self.add_variable((), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(ops.sum(y_pred))

        def result(self):
            return self.total + 0.0

    class ByTape(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                outputs = self(x, training=True)
                loss = self.compute_loss(x, y, outputs)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return self.compute_metrics(x, y, outputs)

    def powers(y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** power, -1)

    inputs = keras.Input((5,))
    model = ByTape(inputs, keras.layers.Dense(3, activation="sigmoid")(Scaled(name="scaled")(inputs)))
    model.compile("sgd", powers, metrics=[Sum()])
    return model


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """The trials that are made, by kind; verdicts are kept in a folder of the test's own."""
    found = []
    monkeypatch.setenv("TFGPU_CACHE", str(tmp_path))
    for owner, method in (
        (layer_trial.LayerTrial, "run"),
        (loss_trial.LossTrial, "run"),
        (metric_trial.MetricTrial, "run"),
        (part_trial.Trial, "run"),
    ):
        stock = getattr(owner, method)

        def noting(self, stock=stock):
            found.append(type(self).__name__)
            return stock(self)

        monkeypatch.setattr(owner, method, noting)
    return found


def fitted(**how):
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model = made(**how)
    model.fit(X, Y, batch_size=8, verbose=0)
    return {piece.name: (piece.verdict, piece.why) for piece in verdicts.of(strategy)}


@pytest.mark.slow
def test_a_second_run_makes_no_trial(trials, tmp_path):
    first = fitted()
    assert sorted(trials) == ["LayerTrial", "LossTrial", "MetricTrial", "_StepTrial"]
    assert len(list((tmp_path / "trials").glob("*.json"))) == 4
    trials.clear()
    assert fitted() == first and trials == []


@pytest.mark.slow
def test_changed_code_makes_its_trials(trials):
    fitted()
    trials.clear()
    fitted(scale=2.0)  # what a layer's function has in its closure; the step runs that layer
    assert sorted(trials) == ["LayerTrial", "_StepTrial"]
    trials.clear()
    fitted(power=3)
    assert sorted(trials) == ["LossTrial", "_StepTrial"]


def test_modules_that_an_outer_function_imports_are_as_those_of_the_file():
    def outer(power):
        import keras as library

        def function(x):
            return library.ops.sum(x) ** power

        return function

    assert code_digest.of(outer(2)) == code_digest.of(outer(2)) != code_digest.of(outer(3))


def entry(tmp_path, value="a"):
    return store.found("kind", (value,), lambda: ["tried"], lambda found: {"word": found[0]}, lambda word: [word])


def test_a_damaged_entry_is_tried_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TFGPU_CACHE", str(tmp_path))
    entry(tmp_path)
    (path,) = (tmp_path / "trials").iterdir()
    whole = path.read_text()
    for damaged in ("", whole[:-3], whole.replace("tried", "other"), whole.replace("found", "lost"), "[1, 2]"):
        path.write_text(damaged)
        assert entry(tmp_path) == ["tried"] and path.read_text() == whole
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_trial(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFGPU_CACHE", str(tmp_path / "file"))
    assert entry(tmp_path) == ["tried"]
    monkeypatch.setenv("TFGPU_CACHE", "off")
    assert entry(tmp_path) == ["tried"] and store.folder() is None


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TFGPU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "tfgpu" / "trials"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.folder() == Path.home() / ".cache" / "tfgpu" / "trials"


def test_old_entries_go(monkeypatch, tmp_path):
    monkeypatch.setenv("TFGPU_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_MOST", 4)
    for at in range(4):
        entry(tmp_path, at)
    before = sorted((tmp_path / "trials").iterdir(), key=lambda path: path.stat().st_mtime)
    for at, path in enumerate(before):
        os.utime(path, (at, at))
    entry(tmp_path, "new")
    kept = set((tmp_path / "trials").iterdir())
    assert len(kept) == 3 and not kept & set(before[:2])


class Base:
    scale = 2

    def call(self, x):
        return helper(x) * self.scale


def variants(value):
    """Functions and objects, each of which another value makes another."""

    class Derived(Base):
        kept = value

    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.kept, self.inner = [value], keras.layers.Dense(value)

        def call(self, x):
            return self.inner(x)

    class Penalty(keras.regularizers.Regularizer):
        def __call__(self, weights):
            return value * ops.sum(weights)

        def get_config(self):
            return {}

    class Kept(dict):
        def total(self):
            return value

    def outer(x):
        def inner():
            return value * x

        return inner()

    inputs = keras.Input((4,))
    twice = keras.Model(inputs, keras.layers.Dense(4, name=f"dense_of_{time.monotonic_ns()}")(inputs) * value)
    return [
        lambda x: x + value,
        outer,
        lambda x, by=value: x + by,
        Derived(),
        Derived,
        Layer(),
        twice,
        np.full(3, value),
        {"a": (value, {value})},
        keras.losses.Huber(delta=value),
        keras.optimizers.SGD(0.1 * value),
        keras.layers.Lambda(lambda x: x * value),
        keras.layers.Dense(2, kernel_regularizer=Penalty()),
        Kept(),
    ]


def test_a_digest_is_of_code_and_values():
    same, again, other = variants(3), variants(3), variants(4)
    for one, two, three in zip(same, again, other, strict=True):
        assert code_digest.of(one) == code_digest.of(two), one
        assert code_digest.of(one) != code_digest.of(three), one


def test_a_digest_follows_what_a_function_uses(monkeypatch):
    before = code_digest.of(Base().call)
    assert code_digest.of(Base().call) == before
    monkeypatch.setitem(globals(), "NUMBER", 4)
    assert code_digest.of(Base().call) != before


@pytest.mark.parametrize("name", ["_self_attention", "_tf_width"])  # named as TensorFlow's own attributes begin
def test_a_digest_follows_any_attribute_of_a_layer(name):
    class Own(keras.layers.Layer):
        def __init__(self, value):
            super().__init__()
            setattr(self, name, value)

    assert code_digest.of(Own(3)) == code_digest.of(Own(3)) != code_digest.of(Own(4))


@pytest.mark.slow
def test_a_digest_knows_weights_of_zero():
    ones, zeros = (keras.Variable(np.full(2, value, "float32")) for value in (1, 0))
    assert code_digest.of(ones) == code_digest.of(zeros)
    assert code_digest.of(ones, weights=True) != code_digest.of(zeros, weights=True)


def reads_a_file(x):
    return x + len(open("settings").read())


def reads_the_environment(x):
    return x + len(os.environ)


def imports(x):
    import random

    return x * random.random()


@pytest.mark.parametrize(
    "thing",
    [reads_a_file, reads_the_environment, imports, iter([1]), tf.data.Dataset.range(3), keras.Input((3,)), object()],
    ids=["file", "environment", "import", "iterator", "dataset", "tensor", "object"],
)
def test_what_is_not_known_has_no_digest(thing):
    with pytest.raises(code_digest.Unknown):
        code_digest.of(thing)


SCRIPT = """
import keras, numpy as np, tfgpu

class Centered(keras.layers.Layer):
    def call(self, x):
        print("tried") if keras.ops.is_tensor(x) and hasattr(x, "numpy") else None
        return x - keras.ops.mean(x, axis=0)

with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((5,)), Centered(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 5)), np.ones((8, 3)), batch_size=8, verbose=0)
print("trained")
"""


@pytest.mark.slow
def test_another_process_knows(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import tfgpu\ntfgpu.environment.set_logical_devices(2)\n" + SCRIPT)
    environ = {**os.environ, "TFGPU_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def run():
        done = subprocess.run(
            [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=600, check=True
        )
        return done.stdout.split()

    assert run()[0] == "tried" and run() == ["trained"]
    script.write_text(script.read_text().replace("axis=0", "axis=0, keepdims=True"))
    assert run()[0] == "tried"
