"""Training on data of a real Spark that runs in one JVM."""

import os
import signal
import sys
from pathlib import Path

import pytest

import tfgpu
from tfgpu.errors import InputError, MachineError

sys.path.insert(0, str(Path(__file__).parent))
import spark_training
from spark_training import MINE, ROWS, check, check_nothing_is_left, frame, run, session, train

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def pyspark():
    found = spark_training.pyspark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield found


@pytest.fixture(scope="module")
def local(pyspark):
    with session("local[2]") as spark:
        yield spark


def test_two_workers_train_as_one_device_does(local, tmp_path):
    reports = []
    found = run(local, tmp_path, on_progress=reports.append)
    check(found)
    epochs = [report for report in reports if "epoch" in report]
    assert [report["epoch"] for report in epochs] == [0, 1, 2]
    assert [report["loss"] for report in epochs] == found[0]["loss"]
    check_nothing_is_left()


def test_shuffled_rows_of_an_rdd_are_assigned_once_to_any_number_of_workers(local):
    def read(data):
        import pyarrow

        return pyarrow.ipc.open_file(data.path).read_all().column("_1").to_pylist()

    rdd = local.sparkContext.parallelize([(i, 0) for i in range(23)], 4)
    options = {"global_batch": 6, "shuffle_seed": 5, "startup_timeout_s": 300}
    whole, chiefs = (tfgpu.launch.spark_job(read, rdd, workers, **options) for workers in (1, 2))
    assert sorted(whole) == list(range(23)) != whole
    batches = [whole[at : at + 6] for at in range(0, 23, 6)]
    assert chiefs == [row for batch in batches for row in batch[: (len(batch) + 1) // 2]]


def test_a_failing_function_is_told_with_its_last_lines(local):
    def fail(data):
        raise ZeroDivisionError(f"{data.rows} rows are too many")

    with pytest.raises(MachineError, match=rf"exit code 1(.|\n)*{ROWS} rows are too many"):
        tfgpu.launch.spark_job(fail, frame(local), 1, global_batch=16, environment=MINE)
    check_nothing_is_left()


def test_a_failure_and_a_preemption_start_the_group_again(local, tmp_path):
    def leave(data, path):
        import os
        import sys

        for name, code in (("failed", 1), ("preempted", 75)):
            if not os.path.exists(path + name):
                open(path + name, "w").close()
                sys.exit(code)
        return data.rows, os.environ["TFGPU_ATTEMPT"]

    path = str(tmp_path / "x")
    found = tfgpu.launch.spark_job(leave, frame(local), 1, global_batch=16, arguments=(path,), max_restarts=1)
    assert found == (ROWS, "3")


def test_a_worker_that_is_asked_to_stop_saves_and_the_next_start_resumes(local, tmp_path):
    seen = []

    def ask(report):
        seen.append(report)
        if report["start"] == 0 and report.get("epoch") == 0:
            os.kill(next(report["process"] for report in seen if "process" in report), signal.SIGTERM)

    check(run(local, tmp_path, 3, None, 0.3, grace_period_s=60, on_progress=ask))
    assert [(report["start"], report["attempt"]) for report in seen if "engine" in report] == [(0, "1"), (1, "2")]
    assert [report["epoch"] for report in seen if "epoch" in report] == [0, 1, 2]
    check_nothing_is_left()


def test_ctrl_c_leaves_nothing_behind(local, tmp_path):
    def interrupt(report):
        if report.get("epoch") == 0:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(local, tmp_path, 1000, grace_period_s=2, on_progress=interrupt)
    check_nothing_is_left()
    assert frame(local).count() == ROWS


def test_missing_resources_are_reported(local):
    rows = frame(local)
    with pytest.raises(MachineError, match="Spark has 2 task slots after startup_timeout_s=1; 3 workers"):
        tfgpu.launch.spark_job(train, rows, 3, global_batch=16, startup_timeout_s=1)
    with pytest.raises(InputError, match="global_batch=1"):
        tfgpu.launch.spark_job(train, rows, 2, global_batch=1)
    with pytest.raises(InputError, match="rows=1"):
        tfgpu.launch.spark_job(train, rows.limit(1), 2, global_batch=16)
    with pytest.raises(InputError, match="Received: list"):
        tfgpu.launch.spark_job(train, [1, 2], 2, global_batch=16)
    with pytest.raises(InputError, match="Received: 0"):
        tfgpu.launch.spark_job(train, rows, 2, global_batch=0)
