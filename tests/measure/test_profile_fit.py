"""Faults planted around `fit`: the cause of a return to Python after each step is named, with advice."""

import keras
import numpy as np
import planted
import pytest
from planted import Watch

import tfgpu
from tfgpu.core import block_event


def data():
    return planted.rows(2048, 16)


def small(**how):
    return planted.model(8, 1, **how)


def fitted(folder, model, *callbacks):
    report = planted.fitted(folder, model, data(), *callbacks)
    return report, {finding.name: finding for finding in report.findings}


@pytest.mark.sample("True")
@pytest.mark.parametrize("every_batch", [True, False])
def test_a_callback_that_looks_at_single_batches_sets_the_steps(tmp_path, every_batch, monkeypatch):
    if not every_batch:  # what the knob says
        monkeypatch.setattr(Watch, "every_batch", False, raising=False)
    report, found = fitted(tmp_path, small(), Watch())
    if every_batch:
        assert report.window.set_by == "callbacks: Watch" and report.window.steps == len(report.window.inside)
    else:
        assert report.window.set_by == "pace" and report.window.steps > len(report.window.inside)
        assert "batch_callback" not in found


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_xla_is_offered_where_it_is_not_in_force(tmp_path, jit):
    model = small()
    model.compile("sgd", "mse", jit_compile=jit)
    report, found = fitted(tmp_path, model)
    assert report.window.jit == jit and report.window.set_by == "pace"
    if "tiny_batch" in found:  # XLA may have made one operation of the step
        assert ("jit_compile" in found["tiny_batch"].knob) == (jit is False)


def test_an_eager_fit_is_found_with_the_line_that_reads(tmp_path):
    _, found = fitted(tmp_path, small(kind=planted.Reading, run_eagerly=True))
    assert "eager_step" in found and found["host_read"].where.startswith("planted.py:")
    assert not found.keys() & {"launching"}


@pytest.fixture
def seen(monkeypatch):
    """The kind of each marked call, and what set its number of steps."""
    found, begin = set(), block_event.steps_begin

    def steps_begin(done, count, kind, set_by, *, jit):
        found.add((kind, set_by))
        return begin(done, count, kind, set_by, jit=jit)

    monkeypatch.setattr(block_event, "steps_begin", steps_begin)
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
    small().test_on_batch(np.ones((4, 8)), np.ones((4, 1)))
    assert seen == {("test", "test_on_batch")}
