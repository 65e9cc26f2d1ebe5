"""A group that a program launches: its settings, reports, results, restarts and errors."""

import contextlib
import json
import pickle
import threading

import pytest

from tfgpu.errors import InputError, MachineError
from tfgpu.launch import Job
from tfgpu.launch.child import REPORT, RESULT, STDERR
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.group import run_until_done, work_of
from tfgpu.launch.functions.relay import EngineLink, Work

SETTINGS = {
    "workers": 2,
    "gpus_per_worker": None,
    "max_restarts": 0,
    "startup_timeout_s": 60.0,
    "heartbeat_timeout_s": 60.0,
    "grace_period_s": 10.0,
    "logs": None,
    "environment": None,
}


class Worker(EngineLink):
    """A connection whose other end answers at once, and whose process ends as it is told."""

    def __init__(self, rank, code, said=()):
        super().__init__(rank)
        self._code, self._said = code, said
        self.tasks, self.asked = [], []
        self.tell("hello", name=f"host{rank}", address="127.0.0.1", cpus=1, gpus=[], python="python", script="x.py")

    def tell(self, event, data=b"", **facts):
        self.put([({"event": event, **facts}, data)])

    def send(self, do, **facts):
        self.asked.append(do)
        if do == "reserve":
            self.tell("ports", ports=[10000 + self.rank])
        if do == "start":
            self.tasks += facts["tasks"]
            for stream, data in self._said:
                self.tell("output", data, id=self.rank, stream=stream, bytes=len(data))
            if self._code is not None:
                self.tell("exit", id=self.rank, code=self._code)
        if do == "end":
            self.tell("ended", left=0)
            self.put(None)


class Workers:
    """Connects to new workers at each attempt, and keeps them."""

    def __init__(self, *attempts):
        self.attempts, self.made = attempts, []

    @contextlib.contextmanager
    def __call__(self, attempt):
        self.made.append([Worker(rank, *each) for rank, each in enumerate(self.attempts[attempt - 1])])
        yield self.made[-1]


def run(workers, on_progress=None, **settings):
    job = Job("x", workers=len(workers.attempts[0]), **settings)
    return run_until_done(Work(job, grace_period_s=0.1), workers, on_progress)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """No back-off."""
    monkeypatch.setattr("tfgpu.launch.functions.group.time.sleep", lambda seconds: None)


def result(value):
    return (RESULT, pickle.dumps(value))


def test_the_chiefs_result_comes_back_and_each_worker_gets_its_place():
    workers = Workers([(0, [result("chief")]), (0, [result("other")])])
    assert run(workers) == "chief"
    for rank, worker in enumerate(workers.made[0]):
        (task,) = worker.tasks
        assert task["command"] == ["python", "-u", "-m", "tfgpu.launch.ending", "x.py"] and task["reports"]
        assert json.loads(task["environment"]["TF_CONFIG"]) == {
            "cluster": {"worker": ["127.0.0.1:10000", "127.0.0.1:10001"]},
            "task": {"type": "worker", "index": rank},
        }


def test_a_single_worker_has_a_cluster_of_its_own():
    workers = Workers([(0, [])])
    assert run(workers) is None
    assert '"127.0.0.1:10000"' in workers.made[0][0].tasks[0]["environment"]["TF_CONFIG"]


def test_reports_arrive_however_they_are_cut():
    reports = []
    run(Workers([(0, [(REPORT, b'{"loss"'), (REPORT, b': 1.5}\n{"loss": 2}\n{"lo')])]), reports.append)
    assert reports == [{"start": 0, "loss": 1.5}, {"start": 0, "loss": 2}]


def test_a_failure_uses_a_restart_and_a_preemption_does_not(caplog):
    workers = Workers([(75,)], [(75,)], [(1,)], [(75,)], [(0, [result(4)])])
    assert run(workers, max_restarts=1) == 4
    attempts = [made[0].tasks[0]["environment"]["TFGPU_ATTEMPT"] for made in workers.made]
    assert attempts == ["1", "2", "3", "4", "5"]
    assert "Attempt 4 starts in 1 s (1 of 1 restarts used)." in caplog.text


def test_the_last_failure_is_told_with_the_last_lines():
    workers = Workers([(None,), (-9,)], [(None,), (1, [(STDERR, b"a line\n")])])
    with pytest.raises(MachineError, match=r"^worker 1 on host1: exit code 1(.|\n)*a line(.|\n)*used \(1\)"):
        run(workers, max_restarts=1)
    assert all("end" in worker.asked for made in workers.made for worker in made)


def test_a_signal_is_named():
    with pytest.raises(MachineError, match=r"killed by SIGKILL(.|\n)*max_restarts=3"):
        run(Workers([(-9,)]))


def test_wrong_input_is_not_restarted():
    workers = Workers([(2,)], [(0,)])
    with pytest.raises(InputError, match="exit code 2"):
        run(workers, max_restarts=5)
    assert len(workers.made) == 1


class Lost(Worker):
    """A connection that breaks when its process is to start."""

    def __init__(self, rank, loss_code):
        super().__init__(rank, None)
        self._loss_code = loss_code

    def send(self, do, **facts):
        super().send(do, **facts)
        if do == "start":
            self.lose(["The machine is gone."], self._loss_code)


@pytest.mark.parametrize(("code", "made"), [(1, 1), (75, 0)])
def test_a_lost_worker_uses_a_restart_unless_it_was_preempted(code, made, caplog):
    class Losing(Workers):
        @contextlib.contextmanager
        def __call__(self, attempt):
            yield [Worker(0, None), Lost(1, code)] if attempt == 1 else [Worker(0, 0), Worker(1, 0)]

    assert run(Losing([(0,), (0,)]), max_restarts=1) is None
    assert "host1 was lost (The machine is gone.)" in caplog.text
    assert f"({made} of 1 restarts used)" in caplog.text


def test_an_error_of_on_progress_ends_the_workers_and_passes():
    def fail(report):
        raise KeyError(report["loss"])

    workers = Workers([(None, [(REPORT, b'{"loss": 7}\n')]), (None,)])
    with pytest.raises(KeyError, match="7"):
        run(workers, fail)
    assert all(worker.asked[-1] == "end" for worker in workers.made[0])


def test_a_script_is_a_job_with_its_own_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    work = work_of("train.py", ["--epochs", 3], **SETTINGS)
    assert work.job.script == str(tmp_path / "train.py") and work.call is None
    assert work.job.arguments == ("--epochs", "3") and work.job.workers == 2


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"workers": 0}, "`workers` must be a whole number of at least 1. Received: 0"),
        ({"max_restarts": -1}, "`max_restarts`"),
        ({"grace_period_s": -1}, "`grace_period_s`"),
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
    with pytest.raises(InputError, match="'train' cannot be sent.*inside it"):

        def train():
            return lock

        pickled.pack(train, ())


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(InputError, match=r"pip install 'tfgpu\[ray\]'"):
        pickled.pack(len, ())
