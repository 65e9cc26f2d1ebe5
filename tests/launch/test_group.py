"""Settings of a launch by an engine, and when the group starts again."""

import pickle
import threading

import pytest

from tfgpu.errors import InputError, MachineError
from tfgpu.launch import Job
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.child import Ended, Work
from tfgpu.launch.functions.group import run_until_done, work_of

SETTINGS = {
    "workers": None,
    "gpus_per_worker": None,
    "max_restarts": 0,
    "startup_timeout_s": 60.0,
    "silence_s": 60.0,
    "grace_s": 10.0,
    "logs": None,
    "environment": None,
}


def ends(*codes):
    """An attempt whose chief ends with these codes, one after another, and the list of the starts."""
    starts = []

    def attempt(work):
        starts.append(work.start)
        code = codes[work.start]
        return Ended(1, code, "host", ("a line",), pickle.dumps(work.start) if code == 0 else None)

    return attempt, starts


def test_a_failure_spends_the_budget_and_a_preemption_does_not():
    attempt, starts = ends(75, 75, 1, 75, 0)
    assert run_until_done(Work(Job("x", max_restarts=1)), attempt) == 4
    assert starts == [0, 1, 2, 3, 4]


def test_the_last_failure_is_told_with_the_last_lines():
    attempt, starts = ends(-9, 1)
    with pytest.raises(MachineError, match=r"Worker 1 on host ended with exit code 1(.|\n)*a line(.|\n)*1 restarts"):
        run_until_done(Work(Job("x", max_restarts=1)), attempt)
    assert starts == [0, 1]


def test_a_signal_is_named():
    with pytest.raises(MachineError, match=r"killed by SIGKILL(.|\n)*max_restarts=3"):
        run_until_done(Work(Job("x")), ends(-9)[0])


def test_wrong_input_is_not_started_again():
    attempt, starts = ends(2, 0)
    with pytest.raises(InputError, match="exit code 2"):
        run_until_done(Work(Job("x", max_restarts=5)), attempt)
    assert starts == [0]


def test_a_script_is_a_job_with_its_own_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    work = work_of("train.py", ["--epochs", 3], **SETTINGS)
    assert work.job.script == str(tmp_path / "train.py") and work.call is None
    assert work.job.arguments == ("--epochs", "3") and work.job.workers == 2


def test_a_job_brings_its_own_settings():
    job = Job("train.py", workers=3)
    assert work_of(job, (), **SETTINGS).job == job
    with pytest.raises(InputError, match="workers to `Job"):
        work_of(job, (), **{**SETTINGS, "workers": 2})
    with pytest.raises(InputError, match="parameter_servers=1"):
        work_of(Job("train.py", parameter_servers=1), (), **SETTINGS)
    with pytest.raises(InputError, match="evaluator=True"):
        work_of(Job("train.py", evaluator=True), (), **SETTINGS)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"workers": 0}, "`workers` must be a whole number from 1. Received: 0"),
        ({"max_restarts": -1}, "`max_restarts`"),
        ({"grace_s": -1}, "`grace_s`"),
        ({"startup_timeout_s": 0}, "`startup_timeout_s`"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(InputError, match=message):
        work_of("train.py", (), **{**SETTINGS, **setting})


def test_what_is_no_training():
    with pytest.raises(InputError, match="Received: 3"):
        work_of(3, (), **SETTINGS)


def test_a_function_that_cannot_travel():
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()
    with pytest.raises(InputError, match="'train' cannot travel.*inside it"):

        def train():
            return lock

        pickled.pack(train, ())


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(InputError, match=r"pip install 'tfgpu\[ray\]'"):
        pickled.pack(len, ())
