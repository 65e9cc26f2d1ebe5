"""Verdicts on recorded trainings: planted faults are found, and none in healthy trainings."""

import planted
import pytest

JUDGED = {name: planted.judge(name) for name in planted.PLANTED}


def found(name):
    return {finding.name: finding for finding in JUDGED[name].findings}


@pytest.mark.parametrize(
    "name, bound, faults",
    [
        ("tiny_batch", "launch-bound", ["tiny_batch"]),
        ("healthy", "compute-bound", []),
        ("batch_callback", "launch-bound", ["batch_callback"]),
        ("eager_fit", "python-bound", ["eager_step", "host_read"]),
        ("eager_step", "python-bound", ["eager_step"]),
        ("work_between_steps", "python-bound", ["work_between_steps"]),
        ("train_on_batch", "launch-bound", ["tiny_batch"]),
    ],
)
def test_a_training_is_bound_by_its_fault(name, bound, faults):
    assert JUDGED[name].verdict == bound and [*found(name)] == faults


def test_a_tiny_batch_is_measured_in_rows():
    report = JUDGED["tiny_batch"]
    assert found("tiny_batch")["tiny_batch"].figures["rows"] == 2 and report.window.marked_by == "tfgpu"
    assert report.window.steps == 20 * len(report.window.inside)


def test_a_healthy_fit_multiplies_matrices():
    report = JUDGED["healthy"]
    assert report.batch == 256
    assert report.top[0].kind.endswith("MatMul")  # plain, fused with what follows it, or oneDNN's


def test_a_callback_that_looks_at_single_batches_is_named():
    report, fault = JUDGED["batch_callback"], found("batch_callback")["batch_callback"]
    assert report.window.set_by == "callbacks: Watch" and report.window.steps == len(report.window.inside)
    assert fault.where == "Watch" and "`every_batch = False`" in fault.knob
    assert "steps_per_execution" not in fault.knob


def test_train_on_batch_has_another_fix_than_fit():
    assert JUDGED["train_on_batch"].window.set_by == "train_on_batch"
    knob = found("train_on_batch")["tiny_batch"].knob
    assert "model.fit(dataset)" in knob and "steps_per_execution" not in knob


def test_an_eager_fit_is_python_s_time():
    report = JUDGED["eager_fit"]
    assert report.shares["python"] > 10 * report.shares["launch"]


def test_python_between_the_steps_is_told_from_launching():
    report = JUDGED["work_between_steps"]
    assert report.shares["between"] > report.shares["launch"]
