"""Faults planted around `fit`: what goes back to Python after every step is named, with a knob that helps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import profiling_hooks
from tfgpu.measure import profile

ROWS = np.ones((2048, 8), "float32"), np.ones((2048, 1), "float32")


class Watch(keras.callbacks.Callback):
    """Looks at single batches, for no reason."""

    def on_train_batch_end(self, batch, logs=None):
        self.last = batch


class Reading(keras.Model):
    """Reads a tensor in each step, as only an eager one can."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.norms = [float(tf.norm(each.value)) for each in self.trainable_variables]
        return logs


def data():
    return tf.data.Dataset.from_tensor_slices(ROWS).batch(16).prefetch(4)


def small(kind=keras.Model, **how):
    tfgpu.repair_keras()
    inputs = keras.Input((8,))
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(inputs)))
    model.compile("sgd", "mse", jit_compile=False, **how)
    return model


def fitted(folder, model, *callbacks):
    with profile(folder, seconds=0.5, ends=True) as session:
        model.fit(data(), epochs=200, verbose=0, callbacks=list(callbacks))
    return session.report, {finding.name: finding for finding in session.report.findings}


def test_a_callback_that_looks_at_single_batches_is_named(tmp_path):
    report, found = fitted(tmp_path / "looks", small(), Watch(), keras.callbacks.EarlyStopping("loss", patience=999))
    assert report.window.set_by == "callbacks: Watch" and report.window.steps == len(report.window.inside)
    assert found["batch_callback"].where == "Watch" and "`every_batch = False`" in found["batch_callback"].knob
    assert not found.keys() & {"tiny_batch", "launching", "work_between_steps", "python_time"}
    assert not any("steps_per_execution" in finding.knob for finding in found.values())
    Watch.every_batch = False  # what the knob says
    try:
        report, found = fitted(tmp_path / "blocks", small(), Watch())
    finally:
        del Watch.every_batch
    assert report.window.set_by == "pace" and report.window.steps > 4 * len(report.window.inside)
    assert "batch_callback" not in found


@pytest.mark.sample("auto")
@pytest.mark.parametrize("jit", [False, "auto"])
def test_xla_is_offered_where_it_is_not_in_force(tmp_path, jit):
    model = small()
    model.compile("sgd", "mse", jit_compile=jit)
    report, found = fitted(tmp_path, model)
    assert report.window.jit == (jit == "auto") and report.window.set_by == "pace"
    if "tiny_batch" in found:  # XLA may have made one operation of the step
        assert ("jit_compile" in found["tiny_batch"].knob) == (jit is False)


def test_train_on_batch_has_another_knob_than_fit(tmp_path):
    model = small()
    with profile(tmp_path, seconds=0.5, ends=True) as session:
        for _ in range(400):
            model.train_on_batch(ROWS[0][:16], ROWS[1][:16])
    assert session.report.window.set_by == "train_on_batch"
    knobs = {finding.name: finding.knob for finding in session.report.findings}
    assert "tfgpu.Trainer(model).fit(dataset)" in (knobs.get("tiny_batch") or knobs["python_time"])
    assert not any("steps_per_execution" in knob for knob in knobs.values())


def test_an_eager_fit_is_python_bound_as_a_loop_is(tmp_path):
    report, found = fitted(tmp_path, small(Reading, run_eagerly=True))
    assert report.verdict == "python-bound" and report.findings[0].name == "eager_step"
    assert report.shares["python"] > 10 * report.shares["launch"]
    assert found["host_read"].where.startswith("test_profile_fit.py:")
    assert not found.keys() & {"tiny_batch", "launching", "python_time"}


@pytest.fixture
def seen(monkeypatch):
    """What each call's mark says of its kind, and of what set its steps."""
    found, begin = set(), profiling_hooks.steps_begin

    def steps_begin(done, count, kind, set_by, *, jit):
        found.add((kind, set_by))
        return begin(done, count, kind, set_by, jit=jit)

    monkeypatch.setattr(profiling_hooks, "steps_begin", steps_begin)
    return found


@pytest.mark.parametrize(
    ("how", "steps", "callbacks", "expected"),
    [
        ({}, None, [], "pace"),
        ({"steps_per_execution": "auto"}, None, [Watch()], "callbacks: Watch"),
        ({"steps_per_execution": 4}, None, [Watch()], "steps_per_execution"),  # Keras calls it each 4 steps
        ({}, 4, [Watch()], "steps_per_call"),
        ({"run_eagerly": True}, None, [Watch()], "run_eagerly"),
        ({}, None, [Watch(), keras.callbacks.TerminateOnNaN(), Watch()], "callbacks: Watch, TerminateOnNaN"),
        ({}, None, [keras.callbacks.LambdaCallback(on_test_batch_end=print)], "pace"),
    ],
)
def test_what_sets_the_steps_of_a_call_is_known(how, steps, callbacks, expected, seen):
    model = small(**how)
    trainer = model if steps is None else tfgpu.Trainer(model, steps_per_call=steps)
    trainer.fit(data().take(4), verbose=0, callbacks=callbacks)
    assert seen == {("train", expected)}


def test_validation_goes_by_the_callbacks_that_look_at_its_batches(seen):
    looks = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: None)
    small().fit(data().take(4), validation_data=data().take(4), verbose=0, callbacks=[looks])
    assert seen == {("train", "pace"), ("test", "callbacks: LambdaCallback")}
    seen.clear()
    small().test_on_batch(ROWS[0][:4], ROWS[1][:4])
    assert seen == {("test", "test_on_batch")}
